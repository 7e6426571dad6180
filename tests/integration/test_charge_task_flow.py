"""One charge after the other through the flow: what an answer comes to, and a repeat."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest

from models.states import State
from tests.support.charge_driver import KEY, Driver, key_of
from tests.support.ledgers import event

# --- what one call can come to -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("customer", "state", "error_code", "decline_code"),
    [
        ("cus_good", State.CHARGED, None, None),
        (
            "cus_decline_insufficient_funds_1",
            State.CARD_DECLINED,
            "card_declined",
            "insufficient_funds",
        ),
        (
            "cus_auth_1",
            State.REQUIRES_ACTION,
            "authentication_required",
            "authentication_required",
        ),
        ("cus_processing_1", State.PROCESSING, None, None),
        ("cus_missing_1", State.REJECTED, "resource_missing", None),
    ],
)
def test_each_answer_settles_the_record_in_its_own_state(
    driver: Driver, customer: str, state: State, error_code: str | None, decline_code: str | None
) -> None:
    billing_event = event(stripe_customer_id=customer)
    assert driver.step(billing_event) == state
    record = driver.record(billing_event)
    assert record.state is state
    assert (record.error_code, record.decline_code) == (error_code, decline_code)
    assert record.settled_at is not None
    assert len(driver.stripe.charges()) == (1 if state is State.CHARGED else 0)


def test_the_intents_id_is_kept_with_a_decline(driver: Driver) -> None:
    billing_event = event(stripe_customer_id="cus_decline_expired_card_1")
    driver.step(billing_event)
    assert (driver.record(billing_event).payment_intent_id or "").startswith("pi_")


def test_the_charge_is_the_events_and_carries_its_names(driver: Driver) -> None:
    billing_event = event(amount_cents=1234, currency="EUR", description="x", metadata={"a": "b"})
    driver.step(billing_event)
    (charge,) = driver.stripe.charges()
    assert (charge["amount"], charge["currency"], charge["customer"]) == (1234, "eur", "cus_T1")
    assert charge["idempotency_key"] == key_of(billing_event)
    assert charge["metadata"] == {
        "a": "b",
        "charge_key": key_of(billing_event),
        "attempt_epoch": "0",
        "customer_id": "cust_1",
        "billing_period": "2026-Q3",
        "billing_run": "2026-Q3",
    }


def test_the_events_own_payment_method_goes_first_and_needs_no_look_at_the_customer(
    driver: Driver,
) -> None:
    billing_event = event(payment_method="pm_card_visa_chargeDeclined")
    assert driver.step(billing_event) == State.CARD_DECLINED
    assert driver.stripe.requests(method="GET") == []


def test_the_charges_endpoint_can_be_chosen(driver: Driver) -> None:
    billing_event = event()
    flow = driver.flow(STRIPE_CHARGE_API="charges")
    assert driver.step(billing_event, flow) == State.CHARGED
    (create,) = driver.stripe.creates()
    assert create["path"] == "/v1/charges"
    assert (driver.record(billing_event).charge_id or "").startswith("ch_")


# --- repeats -----------------------------------------------------------------------------------


def test_a_repeat_of_a_settled_event_calls_nobody(driver: Driver) -> None:
    billing_event = event()
    driver.step(billing_event)
    before = len(driver.stripe.requests())
    assert driver.step(billing_event) == "skip:charged"
    assert driver.step(replace(billing_event, description="another text")) == "skip:charged"
    assert len(driver.stripe.requests()) == before


def test_another_amount_under_the_same_key_changes_nothing(driver: Driver) -> None:
    billing_event = event()
    driver.step(billing_event)
    assert driver.step(replace(billing_event, amount_cents=1)) == "payload_conflict"
    assert driver.record(billing_event).amount_cents == 2500
    assert len(driver.stripe.creates()) == 1


def test_a_live_lease_of_another_worker_is_left_alone(driver: Driver) -> None:
    billing_event = event()
    driver.claim_elsewhere(billing_event)
    assert driver.step(billing_event) == "leave:leased"
    assert driver.stripe.requests() == []


def test_a_key_without_record_and_event_is_let_go(driver: Driver) -> None:
    assert driver.resume(event()) == "no_record"


# --- nothing of the event is logged ------------------------------------------------------------


def test_no_text_of_the_event_and_no_key_is_logged(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    step: Callable[..., str] = driver.step
    for customer in ("cus_good", "cus_decline_fraudulent_1", "cus_missing_1"):
        step(
            event(
                customer_id=customer,
                stripe_customer_id=customer,
                description="MARKER one",
                metadata={"m": "MARKER two"},
            )
        )
    own = [record for record in caplog.records if record.name.startswith("tasks")]
    assert own
    seen = " ".join(f"{record.getMessage()} {vars(record)}" for record in own)
    assert "MARKER" not in seen
    assert KEY not in seen
