"""How long a claim allows to send, and how long its outcome is tried to be written."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from models.errors import LedgerUnavailable
from models.ledger import Applied, Recorded, boot_clock_s
from models.limits import Limits
from models.outcomes import Outcome, OutcomeKind
from models.records import RECORD_COLUMNS, Claim, Record
from models.states import State
from tasks.errors import NotSent, OutcomeNotRecorded
from tasks.recording import report, write_until
from tasks.send_guard import call_deadline_s, send_guard, send_until_s

NOW = datetime(2026, 9, 1, tzinfo=UTC)
LIMITS = Limits()


def record(**values: Any) -> Record:
    plain: dict[str, Any] = dict.fromkeys(RECORD_COLUMNS)
    plain |= {"charge_key": "0" * 32, "state": State.SENT, "attempt_epoch": 0, "deferrals": 0}
    return Record(**(plain | values))


def claim(*, lease_left_s: float = 45, first_sent_ago_s: float = 0) -> Claim:
    sent = record(first_sent_at=NOW - timedelta(seconds=first_sent_ago_s), last_sent_at=NOW)
    return Claim(record=sent, token=uuid4(), boot_deadline_s=boot_clock_s() + lease_left_s)


def test_a_fresh_claim_may_send() -> None:
    send_guard(claim(), LIMITS)()


def test_a_process_that_slept_past_its_lease_does_not_send() -> None:
    with pytest.raises(NotSent):
        send_guard(claim(lease_left_s=-0.001), LIMITS)()


def test_a_process_that_slept_past_the_resend_window_does_not_send() -> None:
    almost = LIMITS.resend_window_s - 30
    send_guard(claim(first_sent_ago_s=almost), LIMITS)()
    slept = claim(lease_left_s=LIMITS.lease_s - 31, first_sent_ago_s=almost)
    with pytest.raises(NotSent):
        send_guard(slept, LIMITS)()


def test_the_lease_ends_it_before_the_window_does() -> None:
    fresh = claim()
    assert send_until_s(fresh, LIMITS) == fresh.boot_deadline_s


def test_a_call_ends_with_its_own_limit_or_with_the_lease() -> None:
    earliest_s = boot_clock_s() + LIMITS.call_s
    assert earliest_s <= call_deadline_s(claim(), LIMITS) <= boot_clock_s() + LIMITS.call_s
    late = claim(lease_left_s=3)
    assert call_deadline_s(late, LIMITS) == late.boot_deadline_s


# --- writing the outcome -----------------------------------------------------------------------


class FlakyWrite:
    """A write that the ledger confirms only after some failures."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.calls = 0

    def __call__(self) -> Recorded:
        self.calls += 1
        if self.calls <= self.failures:
            raise LedgerUnavailable("away")
        return Recorded(Applied.APPLIED, None)


def test_an_outcome_is_written_again_until_the_ledger_confirms_it() -> None:
    write = FlakyWrite(failures=2)
    assert write_until(boot_clock_s() + 60, "k", write).applied is Applied.APPLIED
    assert write.calls == 3


def test_it_is_tried_once_even_when_the_time_is_over() -> None:
    assert write_until(boot_clock_s() - 1, "k", FlakyWrite(0)).applied is Applied.APPLIED


class Clock:
    """Moves on by what is slept, and by nothing else."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_an_outcome_that_is_not_confirmed_in_time_rings(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("tasks.recording.boot_clock_s", clock)
    monkeypatch.setattr("tasks.recording.time", clock)
    write = FlakyWrite(failures=1000)
    with pytest.raises(OutcomeNotRecorded):
        write_until(0.5, "k", write)
    assert write.calls >= 2
    assert clock.now_s < 0.5
    assert "alarm_outcome_not_recorded" in caplog.text


@pytest.mark.parametrize(
    ("kind", "error_code", "applied", "alarm"),
    [
        (OutcomeKind.CHARGED, None, Applied.APPLIED, None),
        (OutcomeKind.CHARGED, None, Applied.FENCED, None),
        (OutcomeKind.CHARGED, None, Applied.LATE_CHARGED, None),
        (OutcomeKind.CHARGED, None, Applied.LATE_REVIEW, "alarm_late_success"),
        (OutcomeKind.CHARGED, None, Applied.DOUBLE_CHARGE, "alarm_double_charge"),
        (OutcomeKind.UNRECOGNISED, None, Applied.APPLIED, "alarm_review"),
        (OutcomeKind.NOT_EXECUTED, "not_connected", Applied.APPLIED, "alarm_not_executed"),
        (OutcomeKind.NOT_EXECUTED, "not_sent", Applied.APPLIED, None),
        (OutcomeKind.NOT_EXECUTED, "absent", Applied.APPLIED, None),
        (OutcomeKind.CARD_DECLINED, "card_declined", Applied.APPLIED, None),
        (OutcomeKind.UNKNOWN, None, Applied.APPLIED, None),
    ],
)
def test_what_rings_and_what_does_not(
    caplog: pytest.LogCaptureFixture,
    kind: OutcomeKind,
    error_code: str | None,
    applied: Applied,
    alarm: str | None,
) -> None:
    caplog.set_level(logging.INFO)
    report(record(), Outcome(kind, error_code=error_code), Recorded(applied, record()))
    rung = [one.message for one in caplog.records if one.message.startswith("alarm_")]
    assert rung == ([alarm] if alarm else [])
