"""A charge whose outcome is not known, or not there: the same request goes out again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from models.ledger import Ledger, boot_clock_s
from models.states import State
from sandbox.ports import free_port
from tests.support.charge_driver import Driver, alarms
from tests.support.ledgers import event

LONG_LEASE_S = 60.0

# --- nothing was executed ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "error_code"), [("http_429", "rate_limit"), ("lock_timeout", "lock_timeout")]
)
def test_a_limiter_puts_the_charge_off_and_the_same_key_goes_out_later(
    driver: Driver, caplog: pytest.LogCaptureFixture, fault: str, error_code: str
) -> None:
    billing_event = event()
    driver.stripe.fault(fault)
    assert driver.step(billing_event) == State.RESERVED
    assert driver.record(billing_event).error_code == error_code
    assert alarms(caplog) == ["alarm_not_executed"]
    assert driver.resume(billing_event) == State.CHARGED
    _same_request_twice(driver)


@pytest.mark.parametrize("key", ["sk_test_bad_1", "sk_test_forbidden_1"])
def test_a_wrong_key_settles_nothing_and_rings(
    driver: Driver, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    billing_event = event(payment_method="pm_card_visa")
    assert driver.step(billing_event, driver.flow(key=key)) == State.RESERVED
    assert "alarm_not_executed" in alarms(caplog)
    assert key not in caplog.text
    assert driver.resume(billing_event) == State.CHARGED


def test_a_stripe_that_is_not_reached_leaves_the_record_reserved(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    billing_event = event(payment_method="pm_card_visa")
    nowhere = driver.flow(base=f"http://127.0.0.1:{free_port()}")
    assert driver.step(billing_event, nowhere) == State.RESERVED
    assert driver.record(billing_event).error_code == "not_connected"
    assert alarms(caplog) == ["alarm_not_executed"]
    assert driver.resume(billing_event) == State.CHARGED


def test_a_preparation_that_fails_keeps_the_event_and_claims_nothing(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    billing_event = event()
    driver.stripe.fault("http_500", method="GET")
    assert driver.step(billing_event) == "reserved:http_500"
    assert driver.record(billing_event).state is State.RESERVED
    assert alarms(caplog) == ["alarm_not_executed"]
    driver.stripe.fault("http_500", method="GET")
    assert driver.resume(billing_event) == "reserved:http_500"
    assert driver.record(billing_event).deferrals == 2
    assert driver.resume(billing_event) == State.CHARGED


def test_a_pause_before_the_next_try_is_kept(driver: Driver) -> None:
    billing_event = event()
    driver.stripe.fault("http_429")
    # Longer than this test takes.
    flow = driver.flow(BACKOFF_BASE_S="60", BACKOFF_CAP_S="60")
    flow.draw = lambda: 0.999
    driver.step(billing_event, flow)
    assert driver.step(billing_event) == "leave:not_due"
    driver.pass_time(60)
    assert driver.step(billing_event) == State.CHARGED


# --- it may have been executed -----------------------------------------------------------------


@pytest.mark.parametrize("stage", ["before", "after_commit"])
@pytest.mark.parametrize("fault", ["reset", "truncate", "html_502"])
def test_an_unknown_outcome_is_resent_with_the_same_key_and_bytes(
    driver: Driver, stage: str, fault: str
) -> None:
    billing_event = event(metadata={"z": "1", "a": "2", "m": "ü"})
    driver.stripe.fault(fault, stage=stage)
    assert driver.step(billing_event) == State.SENT
    assert driver.record(billing_event).unknowns == 1
    assert driver.resume(billing_event) == State.CHARGED
    _same_request_twice(driver)
    assert len(driver.stripe.charges()) == 1


def test_a_call_that_hangs_ends_at_its_deadline_and_is_unknown(driver: Driver) -> None:
    billing_event = event()
    driver.ledger = long_leases(driver)
    driver.stripe.fault("timeout", stage="after_commit")
    flow = driver.flow(CALL_S="0.5")
    began_s = boot_clock_s()
    # Over before the first byte, as on a busy machine, it has sent nothing and goes out again.
    while (done := driver.step(billing_event, flow)) == State.RESERVED:
        assert driver.stripe.creates() == []
    assert done == State.SENT
    assert boot_clock_s() - began_s < LONG_LEASE_S / 2
    assert driver.resume(billing_event) == State.CHARGED
    assert len(driver.stripe.charges()) == 1


def long_leases(driver: Driver) -> Ledger:
    """A ledger whose leases end no call: only the call's own limit does."""
    limits = replace(driver.ledger.limits, lease_s=LONG_LEASE_S)
    return Ledger(driver.engine, limits, "test")


def test_a_refusal_of_a_repeat_says_nothing_about_the_first_send(driver: Driver) -> None:
    billing_event = driver.step_unheard("after_commit")
    driver.stripe.fault("http_429")
    assert driver.resume(billing_event) == State.SENT
    assert driver.resume(billing_event) == State.CHARGED
    assert len(driver.stripe.charges()) == 1


def test_a_resend_uses_the_stored_request_whatever_the_settings_say_by_now(driver: Driver) -> None:
    billing_event = driver.step_unheard("before")
    assert driver.resume(billing_event, driver.flow(STRIPE_CHARGE_API="charges")) == State.CHARGED
    _same_request_twice(driver)


def _same_request_twice(driver: Driver) -> None:
    first, second = driver.stripe.creates()
    assert first["idempotency_key"] == second["idempotency_key"]
    assert first["body_sha256"] == second["body_sha256"]
    assert first["path"] == second["path"]
