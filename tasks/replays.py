"""A dead letter that can be a charge after all, after a raised limit say, becomes `reserved`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.dead_letters import DeadLetters
from models.errors import ChargebridgeError, DeadLetterReason, EventRefused, NotFound, StateForbids
from models.events import decode_event
from models.keys import charge_key
from models.records import NewRecord, Record
from tasks.recharge_flow import check_reason

if TYPE_CHECKING:
    from models.ledger_actions import LedgerActions
    from models.settings import Settings


def replay(
    actions: LedgerActions,
    letters: DeadLetters,
    settings: Settings,
    letter_id: int,
    reason: str,
) -> Record:
    """Make the record and resolve the letter, in one transaction; returns the record.

    Never onto a row that exists, and never a payload conflict: the first event stands. Raises
    NotFound, StateForbids, ChargebridgeError.
    """
    check_reason(reason)
    letter = letters.show(letter_id)
    if letter is None:
        raise NotFound(f"no dead letter {letter_id}")
    if letter.resolved_at is not None:
        raise StateForbids(f"dead letter {letter_id} is resolved: {letter.resolution}")
    if letter.reason == DeadLetterReason.PAYLOAD_CONFLICT:
        raise StateForbids(
            "a payload conflict is never replayed: a corrected amount needs its own billing_period"
        )
    if not letter.body:
        raise StateForbids(f"dead letter {letter_id} has no body ({letter.reason})")
    try:
        event = decode_event(letter.body, max_amount_cents=settings.max_amount_cents)
    except EventRefused as refused:
        raise ChargebridgeError(f"dead letter {letter_id} is still refused: {refused}") from None
    key = charge_key(event.customer_id, event.billing_period, settings.charge_namespace)
    new = NewRecord(event=event, charge_key=key, source=letter.source)
    record = actions.replay(letter_id, new, reason=reason)
    if record is None:
        raise StateForbids(
            f"{event.customer_id} {event.billing_period} has a billing record already; "
            "a dead letter is never replayed onto one"
        )
    return record
