"""What the vault's commands share: one clear line for a failure, tables for people, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import IO, TYPE_CHECKING, Any, Final

import click

from models.errors import ChargebridgeError
from models.texts import is_utf8

if TYPE_CHECKING:
    from sqlalchemy import Engine

MAX_LIMIT: Final = 10_000
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, not a table.")
limit_option = click.option(
    "--limit", type=click.IntRange(1, MAX_LIMIT), default=50, show_default=True, help="Most rows."
)
after_option = click.option(
    "--after", "after_id", type=click.IntRange(min=0), default=0, help="Begin behind this id."
)


class Failed(click.ClickException):
    """One line on stderr, exit code 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the line."""
        click.echo(f"chargebridge: {self.message}", file=file, err=file is None)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn our own errors into one line and exit code 1."""
    try:
        yield
    except ChargebridgeError as error:
        raise Failed(str(error)) from None


@contextmanager
def database() -> Iterator[Engine]:
    """A checked database for one command, whose arguments are texts."""
    from models.database import check_database, make_engine  # noqa: PLC0415 - heavy
    from models.settings import load_settings  # noqa: PLC0415 - heavy

    _refuse_what_is_no_text(click.get_current_context())
    with one_line_errors():
        engine = make_engine(load_settings(), pool_size=1, name="chargebridge-command")
        try:
            check_database(engine)
            yield engine
        finally:
            engine.dispose()


def _refuse_what_is_no_text(ctx: click.Context) -> None:
    for param in ctx.command.params:
        value = ctx.params.get(param.name or "")
        if isinstance(value, str) and not is_utf8(value):
            raise Failed(f"{param.get_error_hint(ctx)} is not UTF-8")


def print_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], *, as_json: bool) -> None:
    """Print a list, as a table or as JSON with everything in it."""
    if as_json:
        click.echo(json.dumps([dict(row) for row in rows], indent=2, default=_plain))
        return
    table = [list(columns), *([_cell(row.get(name)) for name in columns] for row in rows)]
    widths = [max(len(line[at]) for line in table) for at in range(len(columns))]
    for line in table:
        cells = (text.ljust(width) for text, width in zip(line, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


def print_done(value: Mapping[str, object], line: str, *, as_json: bool) -> None:
    """Print what was done, as a line or as JSON."""
    click.echo(json.dumps(dict(value), indent=2, default=_plain) if as_json else line)


def _plain(value: object) -> object:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%SZ")
    return "".join(sign if sign.isprintable() else "?" for sign in str(value))
