"""A charge that may not be sent again is looked up; a person gets what stays open."""

from __future__ import annotations

import pytest

from models.states import State
from tests.support.charge_driver import Driver, alarms
from tests.support.ledgers import event

DAY_S = 24 * 3600.0
PROOF_S = 30.0
"""The fast limit of `proof_of_absence_s`."""


# --- looking up --------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["before", "after_commit"])
def test_past_the_resend_window_a_charge_is_looked_up_not_sent(driver: Driver, stage: str) -> None:
    billing_event = driver.step_unheard(stage)
    driver.pass_time(2 * DAY_S)
    done = driver.resume(billing_event)
    if stage == "before":
        # Proof of absence: the charge goes out now, for the first time.
        assert done == State.RESERVED
        done = driver.resume(billing_event)
    assert done == State.CHARGED
    assert len(driver.stripe.charges()) == 1
    assert len(driver.stripe.creates()) == (2 if stage == "before" else 1)


def test_after_the_fifth_unknown_the_record_waits_until_absence_is_proof(driver: Driver) -> None:
    billing_event = event()
    driver.stripe.fault("html_502", times=5)
    driver.step(billing_event)
    for _ in range(4):
        assert driver.resume(billing_event) == State.SENT
    assert driver.resume(billing_event) == "leave:not_due"
    driver.pass_time(PROOF_S + 1)
    assert driver.resume(billing_event) == State.RESERVED
    assert driver.resume(billing_event) == State.CHARGED
    assert len(driver.stripe.creates()) == 6


def test_a_replayed_500_is_looked_up_and_absence_goes_to_a_person(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    billing_event = event()
    driver.stripe.fault("http_500", stage="after_claim")
    assert driver.step(billing_event) == State.SENT
    assert driver.resume(billing_event) == State.SENT
    assert driver.record(billing_event).look_up
    assert driver.resume(billing_event) == State.SENT
    assert driver.resume(billing_event) == "leave:not_due"
    driver.pass_time(PROOF_S + 1)
    assert driver.resume(billing_event) == State.REVIEW
    assert alarms(caplog) == ["alarm_review"]
    assert len(driver.stripe.creates()) == 2
    assert driver.stripe.charges() == []


def test_a_replayed_500_whose_money_was_taken_is_adopted_at_once(driver: Driver) -> None:
    billing_event = event()
    driver.stripe.fault("http_500", stage="after_commit")
    driver.step(billing_event)
    driver.resume(billing_event)
    assert driver.resume(billing_event) == State.CHARGED
    (charge,) = driver.stripe.charges()
    assert driver.record(billing_event).payment_intent_id == charge["payment_intent"]


def test_another_upstream_key_looks_up_and_never_resends(driver: Driver) -> None:
    billing_event = driver.step_unheard("after_commit")
    assert driver.resume(billing_event, driver.flow(key="sk_test_rolled")) == State.CHARGED
    assert len(driver.stripe.creates()) == 1


def test_an_absent_charge_of_a_customer_who_is_gone_goes_to_a_person(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    billing_event = driver.step_unheard(
        "before", stripe_customer_id="cus_missing_1", payment_method="pm_card_visa"
    )
    driver.pass_time(2 * DAY_S)
    assert driver.resume(billing_event) == State.REVIEW
    assert alarms(caplog) == ["alarm_review"]


def test_a_list_that_is_not_read_leaves_the_record_sent(driver: Driver) -> None:
    billing_event = driver.step_unheard("after_commit")
    driver.pass_time(2 * DAY_S)
    driver.stripe.fault("http_500", method="GET")
    assert driver.resume(billing_event) == State.SENT
    assert driver.record(billing_event).error_code == "look_up_http_500"
    assert driver.resume(billing_event) == State.CHARGED


def test_a_charge_made_through_the_other_endpoint_is_found(driver: Driver) -> None:
    billing_event = driver.step_unheard("after_commit", driver.flow(STRIPE_CHARGE_API="charges"))
    driver.pass_time(2 * DAY_S)
    assert driver.resume(billing_event) == State.CHARGED
    assert len(driver.stripe.charges()) == 1


# --- giving up ---------------------------------------------------------------------------------


def test_ten_claims_without_any_outcome_go_to_a_person(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    billing_event = event()
    request = driver.claim_elsewhere(billing_event, driver.flow().gateway.key_id)
    for _ in range(9):
        driver.pass_time(10)
        assert driver.ledger.claim(driver.record(billing_event), request, None) is not None
    driver.pass_time(10)
    assert driver.resume(billing_event) == State.REVIEW
    assert alarms(caplog) == ["alarm_gave_up"]
    assert driver.stripe.requests() == []
