"""`celery -A tasks recharge …`: known failures are tried again, one or many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from models.errors import LedgerUnavailable
from models.states import KNOWN_FAILURES, State
from tasks.commands.console import Refused, json_option, ledger_engine, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tasks.recharge_flow import Approval, Line, Recharges, Started

MAX_RECHARGES: Final = 1_000
"""Of one command; give --limit to start fewer, and the command again for more."""
DEFAULT_REASON: Final = "manual recharge"
_COLUMNS: Final = (
    "customer_id",
    "billing_period",
    "amount_cents",
    "currency",
    "error_code",
    "decline_code",
    "result",
)


@click.command(name="recharge")
@click.argument("customer_id", metavar="CUSTOMER", required=False)
@click.argument("billing_period", metavar="PERIOD", required=False)
@click.option("--period", help="Many at once: all of this billing period …")
@click.option(
    "--state",
    type=click.Choice([str(state) for state in State if state in KNOWN_FAILURES]),
    help="… that are in this state.",
)
@click.option("--dry-run", is_flag=True, help="Many: only show what would be started.")
@click.option(
    "--limit",
    type=click.IntRange(1, MAX_RECHARGES),
    default=MAX_RECHARGES,
    show_default=True,
    help="Many: start no more than this.",
)
@click.option("--reason", default=DEFAULT_REASON, show_default=True, help="Stands in the audit.")
@click.option("--payment-method", help="Charge this one (pm_…, card_…, src_…) instead.")
@click.option("--from-epoch", type=click.IntRange(0), help="Only if it is in this epoch still.")
@click.option("--force", is_flag=True, help="Even after a hard decline (lost or stolen card …).")
@json_option
@click.pass_context
def recharge(ctx: click.Context, /, **given: Any) -> None:
    """Start another attempt of a failed charge, under a new idempotency key.

    What an earlier attempt left open at Stripe is canceled before the new one is sent; if it was
    paid meanwhile, that payment stands and nothing is sent.
    """
    _check_usage(given)
    if given["period"] is not None:
        _many(ctx, given)
    else:
        _one(ctx, given)


def _check_usage(given: dict[str, Any]) -> None:
    one = given["customer_id"] is not None and given["billing_period"] is not None
    many = given["period"] is not None and given["state"] is not None
    named = [given[name] is not None for name in ("customer_id", "billing_period")]
    chosen = [given[name] is not None for name in ("period", "state")]
    if not (one or many) or (one and any(chosen)) or (many and any(named)):
        raise click.UsageError("give CUSTOMER PERIOD, or --period and --state")
    if one and given["dry_run"]:
        raise click.UsageError("--dry-run goes with --period and --state")
    if many and (given["payment_method"] is not None or given["from_epoch"] is not None):
        raise click.UsageError("--payment-method and --from-epoch go with one CUSTOMER PERIOD")


def _one(ctx: click.Context, given: dict[str, Any]) -> None:
    with ledger_engine(ctx) as (settings, engine):
        started = _recharges(settings, engine).start(
            given["customer_id"],
            given["billing_period"],
            _approval(given),
            from_epoch=given["from_epoch"],
        )
    if given["as_json"]:
        print_json(_started_json(started))
    else:
        click.echo(
            f"recharge of {started.record.customer_id} {started.record.billing_period} started: "
            f"epoch {started.record.attempt_epoch}, request {started.record.request_id}"
        )
    if not started.published:
        click.echo("the broker does not answer: the sweep will publish it", err=True)


def _many(ctx: click.Context, given: dict[str, Any]) -> None:
    with ledger_engine(ctx) as (settings, engine):
        lines = _recharges(settings, engine).many(
            given["period"],
            State(given["state"]),
            _approval(given),
            limit=given["limit"],
            dry_run=given["dry_run"],
        )
        seen: list[Line] = []
        try:
            seen.extend(lines)
        except LedgerUnavailable:
            # It went away half-way: what was started by then is started.
            if seen:
                _print_many(seen, given["as_json"])
            raise
    _print_many(seen, given["as_json"])
    refused = sum(not line.done for line in seen)
    if refused:
        raise Refused(f"{refused} of {len(seen)} were not started; see above")


def _print_many(seen: Sequence[Line], as_json: bool) -> None:
    rows = list(_rows(seen))
    if as_json:
        print_json(rows)
        return
    print_table(_COLUMNS, rows)
    click.echo(f"{sum(line.done for line in seen)} of {len(seen)}", err=True)


def _rows(seen: Sequence[Line]) -> Iterator[dict[str, Any]]:
    for line in seen:
        row = {name: getattr(line.record, name) for name in _COLUMNS if name != "result"}
        yield row | {"charge_key": line.record.charge_key, "result": line.result}


def _approval(given: dict[str, Any]) -> Approval:
    from tasks.recharge_flow import Approval  # noqa: PLC0415 - heavy

    return Approval(given["reason"], given["payment_method"], given["force"])


def _recharges(settings: Any, engine: Any) -> Recharges:
    from models.ledger_actions import LedgerActions  # noqa: PLC0415 - heavy
    from models.ledger_reads import LedgerReads  # noqa: PLC0415 - heavy
    from tasks.operators import operator_of  # noqa: PLC0415 - heavy
    from tasks.publishing import try_publish  # noqa: PLC0415 - heavy
    from tasks.recharge_flow import Recharges  # noqa: PLC0415 - heavy

    actions = LedgerActions(engine, settings.limits, operator_of(settings))
    return Recharges(actions, LedgerReads(engine), lambda key: try_publish(key, "recharge"))


def _started_json(started: Started) -> dict[str, Any]:
    record = started.record
    return {
        "customer_id": record.customer_id,
        "billing_period": record.billing_period,
        "charge_key": record.charge_key,
        "state": record.state,
        "attempt_epoch": record.attempt_epoch,
        "request_id": record.request_id,
        "published": started.published,
    }
