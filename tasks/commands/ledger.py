"""`celery -A tasks ledger …`: what the ledger says, and what people decide about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from models.states import State
from tasks.commands import ledger_actions
from tasks.commands.console import (
    Refused,
    fields_of,
    json_option,
    ledger_engine,
    limit_option,
    print_fields,
    print_json,
    print_page,
    print_table,
)

if TYPE_CHECKING:
    from models.ledger_reads import History
    from models.records import Record

_HIDDEN: Final = frozenset({"event", "lease_token"})
"""Of a record: the event's own texts are nobody's business here, the token nobody's at all."""
_LIST_COLUMNS: Final = (
    "customer_id",
    "billing_period",
    "state",
    "amount_cents",
    "currency",
    "attempt_epoch",
    "attempts",
    "error_code",
    "decline_code",
    "payment_intent_id",
    "updated_at",
)
_CALL_COLUMNS: Final = (
    "started_at",
    "attempt_epoch",
    "endpoint",
    "outcome",
    "http_status",
    "replayed",
    "error_code",
    "payment_intent_id",
    "charge_id",
    "stripe_request_id",
)
_HISTORY_COLUMNS: Final = (
    "at",
    "attempt_epoch",
    "from_state",
    "to_state",
    "move",
    "actor",
    "reason",
)


@click.group(name="ledger")
def ledger() -> None:
    """Billing records: what was charged, what was not, and why."""


@ledger.command()
@click.argument("customer_id", metavar="CUSTOMER")
@click.argument("billing_period", metavar="PERIOD")
@json_option
@click.pass_context
def show(ctx: click.Context, customer_id: str, billing_period: str, as_json: bool) -> None:
    """Show one billing record with every call to Stripe and every change of its state."""
    with ledger_engine(ctx) as (_, engine):
        from models.ledger_reads import LedgerReads  # noqa: PLC0415 - heavy

        history = LedgerReads(engine).show(customer_id, billing_period)
    if history is None:
        raise Refused("no such billing record")
    if as_json:
        print_json(_history_json(history))
        return
    print_fields(_record_json(history.record))
    click.echo("\ncalls")
    print_table(_CALL_COLUMNS, history.attempts)
    click.echo("\nhistory")
    print_table(_HISTORY_COLUMNS, history.events)


@ledger.command(name="list")
@click.option("--state", type=click.Choice([str(state) for state in State]), help="In this state.")
@click.option("--period", help="Of this billing period.")
@click.option("--run", "billing_run", help="Of this billing run.")
@click.option("--customer", help="Of this customer_id.")
@click.option("--after", "after_key", default="", help="After this charge key (page on).")
@limit_option
@json_option
@click.pass_context
def list_records(
    ctx: click.Context,
    state: str | None,
    period: str | None,
    billing_run: str | None,
    customer: str | None,
    after_key: str,
    limit: int,
    as_json: bool,
) -> None:
    """List billing records in the order of their charge keys."""
    with ledger_engine(ctx) as (_, engine):
        from models.ledger_reads import LedgerReads  # noqa: PLC0415 - heavy

        records = LedgerReads(engine).list(
            limit=limit,
            after_key=after_key,
            state=State(state) if state else None,
            billing_period=period,
            billing_run=billing_run,
            customer_id=customer,
        )
    print_page(
        _LIST_COLUMNS,
        [_record_json(record) for record in records],
        as_json=as_json,
        next_after=records[-1].charge_key if len(records) == limit else None,
    )


for _command in (
    ledger_actions.void,
    ledger_actions.resolve,
    ledger_actions.import_charges,
    ledger_actions.recover,
):
    ledger.add_command(_command)


def _record_json(record: Record) -> dict[str, Any]:
    return fields_of(record, but=_HIDDEN)


def _history_json(history: History) -> dict[str, Any]:
    """The record's own fields, with its `calls` and its `history`."""
    return {
        **_record_json(history.record),
        "calls": list(history.attempts),
        "history": list(history.events),
    }
