"""`celery -A tasks dead-letters replay|discard|purge`: what becomes of them."""

from __future__ import annotations

from typing import Final

import click

from tasks.commands.console import Refused, json_option, ledger_engine, print_json

MAX_ID: Final = 2**63 - 1
DAY_S: Final = 86_400
letter_argument = click.argument("letter_id", metavar="ID", type=click.IntRange(1, MAX_ID))
reason_option = click.option("--reason", required=True, help="Stands in the audit.")


@click.command()
@letter_argument
@reason_option
@json_option
@click.pass_context
def replay(ctx: click.Context, letter_id: int, reason: str, as_json: bool) -> None:
    """Charge it after all: a reserved record is made of its event, and the letter is resolved."""
    with ledger_engine(ctx) as (settings, engine):
        from models.dead_letters import DeadLetters  # noqa: PLC0415 - heavy
        from models.deployment import pin_deployment  # noqa: PLC0415 - heavy
        from models.ledger_actions import LedgerActions  # noqa: PLC0415 - heavy
        from tasks.operators import operator_of  # noqa: PLC0415 - heavy
        from tasks.publishing import try_publish  # noqa: PLC0415 - heavy
        from tasks.replays import replay as replayed  # noqa: PLC0415 - heavy

        pin_deployment(engine, settings.charge_namespace)
        actions = LedgerActions(engine, settings.limits, operator_of(settings))
        record = replayed(actions, DeadLetters(engine), settings, letter_id, reason)
        published = try_publish(record.charge_key, "replay")
    if as_json:
        print_json({"charge_key": record.charge_key, "state": record.state, "published": published})
    else:
        click.echo(
            f"dead letter {letter_id} replayed: {record.customer_id} {record.billing_period} "
            f"is {record.state}"
        )


@click.command()
@letter_argument
@reason_option
@json_option
@click.pass_context
def discard(ctx: click.Context, letter_id: int, reason: str, as_json: bool) -> None:
    """Decide that nothing becomes of it. Its body stays until it is purged."""
    with ledger_engine(ctx) as (settings, engine):
        from models.dead_letters import DeadLetters  # noqa: PLC0415 - heavy
        from tasks.operators import operator_of  # noqa: PLC0415 - heavy
        from tasks.recharge_flow import check_reason  # noqa: PLC0415 - heavy

        check_reason(reason)
        letters = DeadLetters(engine)
        done = letters.discard(letter_id, actor=operator_of(settings), reason=reason)
        if not done:
            letter = letters.show(letter_id)
            raise Refused(
                f"no dead letter {letter_id}"
                if letter is None
                else f"dead letter {letter_id} is resolved: {letter.resolution}"
            )
    if as_json:
        print_json({"id": letter_id, "resolution": f"discarded: {reason}"})
    else:
        click.echo(f"dead letter {letter_id} discarded")


@click.command()
@click.argument("letter_id", metavar="[ID]", type=click.IntRange(1, MAX_ID), required=False)
@click.option("--older-than-days", type=click.IntRange(0, 36_500), help="All resolved before that.")
@reason_option
@json_option
@click.pass_context
def purge(
    ctx: click.Context,
    letter_id: int | None,
    older_than_days: int | None,
    reason: str,
    as_json: bool,
) -> None:
    """Drop bodies down to their hash: of one resolved letter, or of all resolved long ago."""
    if (letter_id is None) == (older_than_days is None):
        raise click.UsageError("give ID or --older-than-days")
    with ledger_engine(ctx) as (settings, engine):
        from models.dead_letters import DeadLetters  # noqa: PLC0415 - heavy
        from tasks.operators import operator_of  # noqa: PLC0415 - heavy
        from tasks.recharge_flow import check_reason  # noqa: PLC0415 - heavy

        check_reason(reason)
        purged = DeadLetters(engine).purge(
            actor=operator_of(settings),
            reason=reason,
            letter_id=letter_id,
            older_than_s=float(DAY_S * (older_than_days or 0)),
        )
    if letter_id is not None and not purged:
        raise Refused(
            f"no body to purge in dead letter {letter_id}: it is not there, or open still "
            "(replay or discard it first)"
        )
    if as_json:
        print_json({"purged": purged})
    else:
        click.echo(f"{purged} purged")
