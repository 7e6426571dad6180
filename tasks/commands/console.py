"""What all commands share: one clear line for a failure, tables for people, JSON for programs."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields as dataclass_fields
from datetime import datetime
from typing import IO, TYPE_CHECKING, Any, Final

import click

from models.errors import ChargebridgeError
from models.logs import configure_logging
from models.texts import is_utf8

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from models.settings import Settings

APP_NAME: Final = "chargebridge"
MAX_LIMIT: Final = 10_000
"""Rows of one list; page on with --after."""
MAX_CELL_CHARACTERS: Final = 60
GAP: Final = "  "

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, not a table.")
limit_option = click.option(
    "--limit", type=click.IntRange(1, MAX_LIMIT), default=50, show_default=True, help="Most rows."
)


class Refused(click.ClickException):
    """A command that was refused or failed: one line on stderr, exit code 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the line."""
        click.echo(f"{APP_NAME}: {self.message}", file=file, err=file is None)


def need_app(ctx: click.Context) -> Any:
    """The app of `-A tasks`; a usage error without it: another app has other settings."""
    app = getattr(ctx.obj, "app", None)
    if not ctx.find_root().params.get("app") or getattr(app, "main", None) != APP_NAME:
        raise click.UsageError(f"run it as `celery -A tasks {_name_of(ctx)}`")
    _refuse_what_is_no_text(ctx)
    # An alarm that rings in a command looks as it does in a worker's log.
    configure_logging("command", logging.WARNING)
    return app


def _refuse_what_is_no_text(ctx: click.Context) -> None:
    """Bytes that are not UTF-8 can be no id, name or reason; in a file's name they may stand."""
    for param in ctx.command.params:
        value = ctx.params.get(param.name or "")
        if isinstance(value, str) and not is_utf8(value):
            raise Refused(f"{param.get_error_hint(ctx)} is not UTF-8")


def _name_of(ctx: click.Context) -> str:
    """The command's words after `celery`, however that was started."""
    inner = _name_of(ctx.parent) if ctx.parent is not None and ctx.parent.parent else ""
    return f"{inner} {ctx.info_name}".strip()


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn our own errors into one line and exit code 1."""
    try:
        yield
    except ChargebridgeError as error:
        raise Refused(str(error)) from None


@contextmanager
def ledger_engine(ctx: click.Context) -> Iterator[tuple[Settings, Engine]]:
    """Settings and a checked database for one command; our errors become one line."""
    need_app(ctx)
    from models.database import check_database, make_engine  # noqa: PLC0415 - heavy
    from models.settings import load_settings  # noqa: PLC0415 - heavy

    with one_line_errors():
        settings = load_settings()
        engine = make_engine(settings, pool_size=1, name="chargebridge-command")
        try:
            check_database(engine)
            yield settings, engine
        finally:
            engine.dispose()


def print_json(value: object) -> None:
    """Print a value as indented JSON; times in ISO 8601."""
    click.echo(json.dumps(value, indent=2, default=_plain, ensure_ascii=False))


def _plain(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def print_table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Print rows under headings, as wide as they need; numbers to the right."""
    table = [[_cell(row.get(name)) for name in columns] for row in rows]
    right = [
        bool(table) and all(cells[at].lstrip("-").isdecimal() or not cells[at] for cells in table)
        for at in range(len(columns))
    ]
    widths = [max(len(line[at]) for line in [list(columns), *table]) for at in range(len(columns))]
    for line in [list(columns), *table]:
        cells = [
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(line, widths, right, strict=True)
        ]
        click.echo(GAP.join(cells).rstrip())


def print_page(
    columns: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    *,
    as_json: bool,
    next_after: object = None,
) -> None:
    """Print one page of a list, whole as JSON or these columns as a table.

    `next_after` is where the next page begins, None after the last one; the table says it on
    stderr.
    """
    if as_json:
        print_json(rows)
        return
    print_table(columns, rows)
    if next_after is not None:
        click.echo(f"more: --after {next_after}", err=True)


def fields_of(value: Any, *, but: Collection[str]) -> dict[str, Any]:
    """A dataclass value's fields by name, without those that are not to be shown."""
    return {
        field.name: getattr(value, field.name)
        for field in dataclass_fields(value)
        if field.name not in but
    }


def print_fields(fields: Mapping[str, Any]) -> None:
    """Print names and values one below the other; what is not set is left out."""
    shown = {name: _cell(value, cut=False) for name, value in fields.items() if value is not None}
    width = max((len(name) for name in shown), default=0)
    for name, text in shown.items():
        click.echo(f"{name.ljust(width)}{GAP}{text}")


def _cell(value: object, *, cut: bool = True) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%SZ")
    # What came from outside must not move the cursor of whoever reads it.
    text = "".join(sign if sign.isprintable() else "?" for sign in str(value))
    if cut and len(text) > MAX_CELL_CHARACTERS:
        return text[: MAX_CELL_CHARACTERS - 1] + "…"
    return text
