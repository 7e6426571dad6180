"""`celery -A tasks reconcile RUN`: expected events, ledger and Stripe held against each other."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from tasks.commands.console import json_option, ledger_engine, print_table
from tasks.commands.times import moment_option

if TYPE_CHECKING:
    from tasks.reconcile_flow import Reconciliation, Summary
    from tasks.reconcile_scratch import Line

PLAIN: Final = ("found",)
"""What the table leaves out: lines that say nothing."""
MAX_TABLE_LINES: Final = 1_000
"""Of the table; --json and --csv give all."""
_TABLE_COLUMNS: Final = (
    "verdict",
    "customer_id",
    "billing_period",
    "currency",
    "expected_cents",
    "ledger_cents",
    "stripe_cents",
    "ledger_state",
    "stripe_object",
    "refunded_cents",
    "note",
)


@click.command(name="reconcile")
@click.argument("billing_run", metavar="RUN")
@click.option(
    "--expected",
    type=click.Path(path_type=Path),
    metavar="FILE.jsonl",
    help="Billing events, one a line, that this run should have charged.",
)
@click.option(
    "--republish",
    type=click.Choice(["nsq", "redis"]),
    help="Publish the missing ones of --expected there, byte for byte.",
)
@moment_option(
    "--since", help="List Stripe from here on; default a day before the run's first record."
)
@json_option
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV with all lines, not a table.")
@click.pass_context
def reconcile(ctx: click.Context, /, billing_run: str, **given: Any) -> None:
    """Hold what was expected, what the ledger says and what Stripe shows against each other.

    What Stripe charged and the ledger lost is adopted first. The last line says whether the run
    may be closed, and why not.
    """
    if given["republish"] and given["expected"] is None:
        raise click.UsageError("--republish needs --expected")
    if given["as_json"] and given["as_csv"]:
        raise click.UsageError("--json or --csv")
    with ledger_engine(ctx) as (settings, _):
        from tasks.deployment import check_account  # noqa: PLC0415 - heavy
        from tasks.operators import operator_of  # noqa: PLC0415 - heavy
        from tasks.reconcile import reconciliation  # noqa: PLC0415 - heavy
        from tasks.runtime import build_runtime  # noqa: PLC0415 - heavy

        here = build_runtime(settings)
        try:
            check_account(here)
            with reconciliation(here, billing_run, operator_of(settings)) as work:
                _reconcile(work, given)
        finally:
            here.close()


def _reconcile(work: Reconciliation, given: dict[str, Any]) -> None:
    from tasks.republish import republish  # noqa: PLC0415 - heavy

    since: datetime | None = given["since"]
    work.run(given["expected"], since)
    republished = 0
    if given["republish"]:
        republished = republish(work.settings, given["republish"], work.missing())
    summary = work.summary()
    summary.republished = republished
    if given["as_json"]:
        _print_json(work, summary)
    elif given["as_csv"]:
        _print_csv(work)
        click.echo(summary.last_line, err=True)
    else:
        _print_report(work, summary)


def _print_report(work: Reconciliation, summary: Summary) -> None:
    shown: list[dict[str, Any]] = []
    more = 0
    for line in work.scratch.lines():
        if line.verdict in PLAIN and not (line.adopted or line.refunded_cents or line.disputed):
            continue
        if len(shown) < MAX_TABLE_LINES:
            shown.append(_row(line))
        else:
            more += 1
    if shown:
        print_table(_TABLE_COLUMNS, shown)
        click.echo()
    if more:
        click.echo(f"and {more} more lines: see --csv")
    for verdict, count in sorted(summary.counts.items()):
        click.echo(f"{verdict}: {count}")
    for name in ("adopted", "republished", "refunded", "disputed"):
        if getattr(summary, name):
            click.echo(f"{name}: {getattr(summary, name)}")
    for currency, total in sorted(summary.stripe_total_cents.items()):
        expected = f"expected {summary.expected_total_cents[currency]}, "
        click.echo(
            f"total {currency}: {expected if work.scratch.expecting else ''}"
            f"ledger {summary.ledger_total_cents[currency]}, Stripe {total}"
        )
    click.echo(summary.last_line)


def _print_json(work: Reconciliation, summary: Summary) -> None:
    """One object, written bit by bit: the lines are never all in memory."""
    head = {
        "billing_run": summary.billing_run,
        "closable": not summary.why_not,
        "why_not": summary.why_not,
        "summary": summary.last_line,
        "counts": dict(summary.counts),
        "adopted": summary.adopted,
        "republished": summary.republished,
        "refunded": summary.refunded,
        "disputed": summary.disputed,
        "expected_total_cents": dict(summary.expected_total_cents),
        "ledger_total_cents": dict(summary.ledger_total_cents),
        "stripe_total_cents": dict(summary.stripe_total_cents),
    }
    click.echo(json.dumps(head, indent=2, ensure_ascii=False)[:-2] + ',\n  "lines": [', nl=False)
    before = "\n    "
    for line in _rows(work):
        click.echo(before + json.dumps(line, ensure_ascii=False), nl=False)
        before = ",\n    "
    click.echo("\n  ]\n}")


def _print_csv(work: Reconciliation) -> None:
    from tasks.reconcile_scratch import LINE_COLUMNS  # noqa: PLC0415 - heavy

    writer = csv.DictWriter(sys.stdout, [*LINE_COLUMNS, "note"], lineterminator="\n")
    writer.writeheader()
    for row in _rows(work):
        writer.writerow({name: _harmless(value) for name, value in row.items()})


def _harmless(value: Any) -> Any:
    """A text that a spreadsheet would run as a formula is kept from it."""
    return f"'{value}" if isinstance(value, str) and value[:1] in "=+-@\t\r" and value else value


def _rows(work: Reconciliation) -> Iterator[dict[str, Any]]:
    for line in work.scratch.lines():
        yield _row(line)


def _row(line: Line) -> dict[str, Any]:
    values = {name: getattr(line, name) for name in type(line).__dataclass_fields__}
    notes = []
    if line.adopted:
        notes.append("adopted")
    if line.disputed:
        notes.append("disputed")
    if line.refunded_cents:
        notes.append("refunded")
    return values | {"verdict": str(line.verdict), "note": ", ".join(notes)}
