"""Every alarm there is. A person should look when one of these names stands in a log."""

from __future__ import annotations

import logging
import math
from enum import StrEnum

from models.ledger import boot_clock_s

logger = logging.getLogger(__name__)


class Alarm(StrEnum):
    """The static names, as they stand in the log."""

    DOUBLE_CHARGE = "alarm_double_charge"
    """A second success for one charge key. Must never ring."""
    LATE_SUCCESS = "alarm_late_success"
    """Money was taken for a record that was settled without; it is in review now."""
    GAVE_UP = "alarm_gave_up"
    """Too many claims ended without any outcome; the record is in review now."""
    REVIEW = "alarm_review"
    """What became of a charge could not be established; the record is in review now."""
    NOT_EXECUTED = "alarm_not_executed"
    """Stripe was not reached or refused everything (a wrong key, say); charges wait."""
    OUTCOME_NOT_RECORDED = "alarm_outcome_not_recorded"
    """Stripe answered and the ledger did not; the record stays `sent` and is sent again."""
    KEY_MISMATCH = "alarm_key_mismatch"
    """A publisher computed another charge key than this worker: two versions or a bug."""
    REQUEST_LOST = "alarm_request_lost"
    """A `sent` record has no stored request; it is looked up, never built anew."""
    LIMITER_LOST = "alarm_limiter_lost"
    """Redis does not answer: requests to Stripe go out without the shared limit."""
    RATE_LIMITED = "alarm_rate_limited"
    """Stripe refuses requests as too many: the limit is set too high, or others use it too."""
    HOLD_MISSING = "alarm_hold_missing"
    """Money was taken that the vault holds nothing for: its budget does not count it."""
    CLOCK = "alarm_clock"
    """The database's clock is off, or was: windows and proofs are counted on it."""
    EVENT_REFUSED = "alarm_event_refused"
    """A publisher let in what this worker takes for no billing event: two versions or a bug."""
    STUCK = "alarm_stuck"
    """The oldest unsettled record is older than it should ever be."""


_CRITICAL = frozenset({Alarm.DOUBLE_CHARGE, Alarm.LATE_SUCCESS, Alarm.KEY_MISMATCH})


_rung_at_s: dict[Alarm, float] = {}


def ring(alarm: Alarm, **ids: str | int | float | None) -> None:
    """Log an alarm with the ids that it is about."""
    level = logging.CRITICAL if alarm in _CRITICAL else logging.ERROR
    logger.log(level, alarm.value, extra=ids)


def ring_seldom(alarm: Alarm, pause_s: float, **ids: str | int | float | None) -> None:
    """The same, unless it has rung in this process within the pause."""
    now_s = boot_clock_s()
    if now_s - _rung_at_s.get(alarm, -math.inf) >= pause_s:
        _rung_at_s[alarm] = now_s
        ring(alarm, **ids)
