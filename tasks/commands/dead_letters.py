"""`celery -A tasks dead-letters …`: deliveries that can never become a charge."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Final

import click

from models.errors import DeadLetterReason
from tasks.commands import dead_letter_actions
from tasks.commands.console import (
    Refused,
    fields_of,
    json_option,
    ledger_engine,
    limit_option,
    print_fields,
    print_json,
    print_page,
)

if TYPE_CHECKING:
    from models.dead_letters import DeadLetter

_LIST_COLUMNS: Final = (
    "id",
    "source",
    "place",
    "delivery_id",
    "reason",
    "detail",
    "count",
    "body_size",
    "charge_key",
    "last_seen_at",
)
MAX_ID: Final = 2**63 - 1


@click.group(name="dead-letters")
def dead_letters() -> None:
    """Deliveries that were refused for good, each with its reason and its whole body."""


@dead_letters.command(name="list")
@click.option(
    "--reason",
    type=click.Choice([str(reason) for reason in DeadLetterReason]),
    help="Refused for this reason.",
)
@click.option("--all", "include_resolved", is_flag=True, help="With those that were dealt with.")
@click.option("--after", type=click.IntRange(0, MAX_ID), default=0, help="After this id (page on).")
@limit_option
@json_option
@click.pass_context
def list_letters(
    ctx: click.Context,
    reason: str | None,
    include_resolved: bool,
    after: int,
    limit: int,
    as_json: bool,
) -> None:
    """List dead letters in the order of their coming, without their bodies."""
    with ledger_engine(ctx) as (_, engine):
        from models.dead_letters import DeadLetters  # noqa: PLC0415 - heavy

        letters = DeadLetters(engine).list(
            limit=limit, after_id=after, reason=reason, include_resolved=include_resolved
        )
    print_page(
        _LIST_COLUMNS,
        [_summary(letter) for letter in letters],
        as_json=as_json,
        next_after=letters[-1].id if len(letters) == limit else None,
    )


@dead_letters.command()
@click.argument("letter_id", metavar="ID", type=click.IntRange(1, MAX_ID))
@json_option
@click.pass_context
def show(ctx: click.Context, letter_id: int, as_json: bool) -> None:
    """Show one dead letter with its body. The body can hold personal data."""
    with ledger_engine(ctx) as (_, engine):
        from models.dead_letters import DeadLetters  # noqa: PLC0415 - heavy

        letter = DeadLetters(engine).show(letter_id)
    if letter is None:
        raise Refused("no such dead letter")
    whole = _summary(letter) | _body(letter.body)
    if as_json:
        print_json(whole)
    else:
        print_fields(whole)


for _command in (
    dead_letter_actions.replay,
    dead_letter_actions.discard,
    dead_letter_actions.purge,
):
    dead_letters.add_command(_command)


def _summary(letter: DeadLetter) -> dict[str, Any]:
    return fields_of(letter, but=("body",))


def _body(body: bytes | None) -> dict[str, str | None]:
    """The body as text where it is UTF-8, else in base64; both None after a purge."""
    if body is None:
        return {"body": None, "body_base64": None}
    try:
        return {"body": body.decode("utf-8"), "body_base64": None}
    except UnicodeDecodeError:
        return {"body": None, "body_base64": base64.b64encode(body).decode()}
