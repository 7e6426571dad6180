"""`celery -A tasks ledger void|resolve|import|recover`: what people decide about records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from tasks.commands.console import Refused, json_option, ledger_engine, need_app, print_json
from tasks.commands.times import moment_option

if TYPE_CHECKING:
    from models.records import Record
    from tasks.manual import Manual

PING_S: Final = 5.0
"""A worker on a busy machine may be slow to say that it is there."""
MAX_NAMED: Final = 3
customer_argument = click.argument("customer_id", metavar="CUSTOMER")
period_argument = click.argument("billing_period", metavar="PERIOD")
reason_option = click.option("--reason", required=True, help="Stands in the audit.")


@click.command()
@customer_argument
@period_argument
@reason_option
@json_option
@click.pass_context
def void(
    ctx: click.Context, customer_id: str, billing_period: str, reason: str, as_json: bool
) -> None:
    """Decide that it must not be charged, even before its event came. What is open is canceled."""
    with _manual(ctx) as manual:
        record = manual.void(customer_id, billing_period, reason)
    _show(record, as_json)


@click.command()
@customer_argument
@period_argument
@click.option("--charged", "object_id", metavar="OBJECT", help="By this intent or charge.")
@click.option("--not-charged", is_flag=True, help="No money was taken: it becomes rejected.")
@reason_option
@json_option
@click.pass_context
def resolve(
    ctx: click.Context,
    /,
    customer_id: str,
    billing_period: str,
    **given: Any,
) -> None:
    """Close a review: as charged, by an object that is checked at Stripe, or as not charged."""
    if (given["object_id"] is None) != given["not_charged"]:
        raise click.UsageError("give --charged OBJECT or --not-charged")
    with _manual(ctx) as manual:
        if given["not_charged"]:
            record = manual.resolve_not_charged(customer_id, billing_period, given["reason"])
        else:
            record = manual.resolve_charged(
                customer_id, billing_period, given["object_id"], given["reason"]
            )
    _show(record, given["as_json"])


@click.command(name="import")
@click.argument("file", type=click.Path(path_type=Path))
@json_option
@click.pass_context
def import_charges(ctx: click.Context, file: Path, as_json: bool) -> None:
    """Take over charges of an earlier system, before the first bridge starts. All or none.

    FILE has one JSON object a line: customer_id, billing_period, stripe_customer_id, charge_id,
    amount_cents, currency.
    """
    with ledger_engine(ctx) as (settings, engine):
        from models.deployment import pin_deployment  # noqa: PLC0415 - heavy
        from models.ledger_actions import LedgerActions  # noqa: PLC0415 - heavy
        from tasks.imports import import_file  # noqa: PLC0415 - heavy
        from tasks.operators import operator_of  # noqa: PLC0415 - heavy

        pin_deployment(engine, settings.charge_namespace)
        actions = LedgerActions(engine, settings.limits, operator_of(settings))
        new, known = import_file(actions, settings, file)
    if as_json:
        print_json({"imported": new, "known": known})
    else:
        click.echo(f"{new} imported, {known} were known")


@click.command()
@moment_option(
    "--since", required=True, help="When the restored copy was taken; ISO 8601, UTC by default."
)
@click.option("--force", is_flag=True, help="Although it is not known whether workers run.")
@json_option
@click.pass_context
def recover(ctx: click.Context, since: datetime, force: bool, as_json: bool) -> None:
    """After a database restore: adopt what Stripe shows, look up what was unsettled.

    Stop all workers first. They refuse to start until this has run to its end.
    """
    if not force:
        _refuse_with_workers(need_app(ctx))
    with ledger_engine(ctx) as (settings, _):
        from models.ledger_actions import LedgerActions  # noqa: PLC0415 - heavy
        from tasks.deployment import check_account  # noqa: PLC0415 - heavy
        from tasks.operators import operator_of  # noqa: PLC0415 - heavy
        from tasks.recover import Recovery  # noqa: PLC0415 - heavy
        from tasks.runtime import build_runtime  # noqa: PLC0415 - heavy

        here = build_runtime(settings)
        try:
            check_account(here)
            actions = LedgerActions(here.engine, settings.limits, operator_of(settings))
            done = Recovery(actions, here.gateway, settings).run(since)
        finally:
            here.close()
    if as_json:
        print_json({name: getattr(done, name) for name in done.__dataclass_fields__})
    else:
        click.echo(
            f"{done.seen} successes at Stripe, {done.charged} records made charged by them; "
            f"{done.open} made for what is still open; "
            f"{done.looked_up} unsettled ones will be looked up; {done.skipped} objects skipped"
        )


def _refuse_with_workers(app: Any) -> None:
    try:
        found = app.control.inspect(timeout=PING_S).ping() or {}
    except Exception as error:
        raise Refused(
            f"the broker does not answer ({type(error).__name__}): whether workers run is not "
            "known (--force, when you know that none does)"
        ) from None
    if found:
        names = ", ".join(sorted(found)[:MAX_NAMED])
        raise Refused(f"stop all workers first: {names} of {len(found)}")


@contextmanager
def _manual(ctx: click.Context) -> Iterator[Manual]:
    with ledger_engine(ctx) as (settings, _):
        from models.ledger_actions import LedgerActions  # noqa: PLC0415 - heavy
        from tasks.deployment import check_account, check_names  # noqa: PLC0415 - heavy
        from tasks.manual import Manual  # noqa: PLC0415 - heavy
        from tasks.operators import operator_of  # noqa: PLC0415 - heavy
        from tasks.runtime import build_runtime  # noqa: PLC0415 - heavy

        here = build_runtime(settings)
        actions = LedgerActions(here.engine, settings.limits, operator_of(settings))
        try:
            check_names(here)
            yield Manual(
                actions,
                here.ledger,
                here.reads,
                here.gateway,
                settings.charge_namespace,
                holds=here.holds,
                before_asking=lambda: check_account(here),
            )
        finally:
            here.close()


def _show(record: Record, as_json: bool) -> None:
    if as_json:
        names = ("customer_id", "billing_period", "charge_key", "state", "attempt_epoch")
        print_json({name: getattr(record, name) for name in names})
    else:
        click.echo(f"{record.customer_id} {record.billing_period} is {record.state}")
