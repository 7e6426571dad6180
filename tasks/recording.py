"""Writes outcomes to the ledger, as long as there is time, and rings what has to ring."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from models.errors import LedgerUnavailable
from models.ledger import Applied, Recorded, boot_clock_s
from models.outcomes import Outcome, OutcomeKind
from tasks.alarms import Alarm, ring
from tasks.errors import OutcomeNotRecorded

if TYPE_CHECKING:
    from models.records import Record

FIRST_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 2.0
EXPECTED: Final = ("not_sent", "absent")
"""Reasons of ours for a charge that was not executed: nothing is wrong with Stripe."""

logger = logging.getLogger(__name__)


def write_until(deadline_s: float, charge_key: str, write: Callable[[], Recorded]) -> Recorded:
    """Try a write of the ledger until it is confirmed; at least once, then until the deadline.

    Each try is on a connection that was found working. Raises OutcomeNotRecorded when the
    time is over: what the call came to is then established again, with the same key.
    """
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return write()
        except LedgerUnavailable:
            if boot_clock_s() + pause_s >= deadline_s:
                ring(Alarm.OUTCOME_NOT_RECORDED, charge_key=charge_key)
                raise OutcomeNotRecorded("the ledger did not take the outcome in time") from None
            logger.warning("outcome_write_repeated", extra={"charge_key": charge_key})
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, MAX_PAUSE_S)


def report(before: Record, outcome: Outcome, recorded: Recorded) -> str:
    """Log what was written, ring what must not pass unseen; the record's state now."""
    after = recorded.record
    ids: dict[str, str | int | float | None] = {
        "charge_key": before.charge_key,
        "epoch": before.attempt_epoch,
        "outcome": outcome.kind,
        "state": after.state if after is not None else None,
        "applied": recorded.applied,
        "http_status": outcome.http_status,
        "error_code": outcome.error_code,
        "payment_intent_id": outcome.payment_intent_id,
        "stripe_request_id": outcome.request_id,
        "replayed": outcome.replayed,
    }
    logger.info("charge_outcome", extra=ids)
    alarm = _alarm(outcome, recorded.applied)
    if alarm is not None:
        ring(alarm, **ids)
    return str(after.state) if after is not None else str(outcome.state)


def _alarm(outcome: Outcome, applied: Applied) -> Alarm | None:
    if applied is Applied.DOUBLE_CHARGE:
        return Alarm.DOUBLE_CHARGE
    if applied is Applied.LATE_REVIEW:
        return Alarm.LATE_SUCCESS
    if applied is not Applied.APPLIED:
        # A worker that slept finds its deadline over: the record is in other hands by now.
        return None
    if outcome.kind is OutcomeKind.UNRECOGNISED:
        return Alarm.REVIEW
    if outcome.kind is OutcomeKind.NOT_EXECUTED and outcome.error_code not in EXPECTED:
        return Alarm.NOT_EXECUTED
    return None
