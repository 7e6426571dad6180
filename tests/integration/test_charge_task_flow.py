"""One charge after the other through the flow: real ledger, simulated Stripe, no Celery."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from sqlalchemy.engine import Engine

from models.events import BillingEvent
from models.keys import charge_key
from models.ledger import Ledger, boot_clock_s
from models.ledger_reads import LedgerReads
from models.records import Record
from models.settings import load_settings
from models.states import State
from sandbox import clock
from sandbox.ports import free_port
from tasks.cancel_earlier import EarlierObjects
from tasks.charge_flow import ChargeFlow, Order
from tasks.look_up import LookUp
from tasks.requests import build_request
from tasks.stripe_gateway import StripeGateway
from tests.support.ledgers import event, new_record
from tests.support.stripe import Stripe

KEY = "sk_test_flow"
TASK_S = 6.0
PROOF_S = 30.0
"""The fast limit of `proof_of_absence_s`."""


class Driver:
    """Takes steps for billing records, and lets time pass."""

    def __init__(self, engine: Engine, ledger: Ledger, stripe: Stripe, database_url: str) -> None:
        self.engine = engine
        self.ledger = ledger
        self.stripe = stripe
        self.database_url = database_url
        self.gateways: list[StripeGateway] = []
        clock.install(database_url)

    def flow(self, *, key: str = KEY, base: str | None = None, **env: str) -> ChargeFlow:
        settings = load_settings({"LIMITS": "fast", **env})
        gateway = StripeGateway(key, base or self.stripe.base_url)
        self.gateways.append(gateway)
        reads = LedgerReads(self.engine)
        look_up = LookUp(self.ledger, reads, gateway, self.ledger.limits, draw=lambda: 0.0)
        earlier = EarlierObjects(self.ledger, reads, gateway)
        return ChargeFlow(self.ledger, gateway, settings, look_up, earlier, draw=lambda: 0.0)

    def step(self, billing_event: BillingEvent | None, flow: ChargeFlow | None = None) -> str:
        """One task for this event."""
        assert billing_event is not None
        key = key_of(billing_event)
        return (flow or self.flow()).run(Order(key, billing_event, "nsq"), boot_clock_s() + TASK_S)

    def resume(self, billing_event: BillingEvent, flow: ChargeFlow | None = None) -> str:
        """One task from the ledger alone, as the sweep would start it."""
        order = Order(key_of(billing_event), None, "sweep")
        return (flow or self.flow()).run(order, boot_clock_s() + TASK_S)

    def pass_time(self, seconds: float) -> None:
        clock.advance(self.database_url, seconds)
        self.stripe.clock(seconds)

    def record(self, billing_event: BillingEvent) -> Record:
        found = self.ledger.read(key_of(billing_event)).record
        assert found is not None
        return found


def key_of(billing_event: BillingEvent) -> str:
    return charge_key(billing_event.customer_id, billing_event.billing_period)


@pytest.fixture
def driver(engine: Engine, ledger: Ledger, stripe: Stripe, database_url: str) -> Iterator[Driver]:
    driver = Driver(engine, ledger, stripe, database_url)
    yield driver
    for gateway in driver.gateways:
        gateway.close()


def alarms(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.message.startswith("alarm_")]


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
    new = new_record(billing_event)
    request = build_request(
        billing_event,
        new.charge_key,
        epoch=0,
        payment_method=None,
        key_id="k",
        namespace="stripe-billing",
    )
    assert driver.ledger.claim_new(new, request, None) is not None
    assert driver.step(billing_event) == "leave:leased"
    assert driver.stripe.requests() == []


def test_a_key_without_record_and_event_is_let_go(driver: Driver) -> None:
    assert driver.resume(event()) == "no_record"


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
    flow = driver.flow()
    flow.draw = lambda: 0.999
    driver.step(billing_event, flow)
    assert driver.step(billing_event) == "leave:not_due"
    driver.pass_time(6)
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
    driver.stripe.fault("timeout", stage="after_commit")
    began_s = boot_clock_s()
    assert driver.step(billing_event, driver.flow(CALL_S="0.5")) == State.SENT
    assert boot_clock_s() - began_s < 3
    assert driver.resume(billing_event) == State.CHARGED
    assert len(driver.stripe.charges()) == 1


def test_a_refusal_of_a_repeat_says_nothing_about_the_first_send(driver: Driver) -> None:
    billing_event = event()
    driver.stripe.fault("reset", stage="after_commit")
    driver.step(billing_event)
    driver.stripe.fault("http_429")
    assert driver.resume(billing_event) == State.SENT
    assert driver.resume(billing_event) == State.CHARGED
    assert len(driver.stripe.charges()) == 1


def test_a_resend_uses_the_stored_request_whatever_the_settings_say_by_now(driver: Driver) -> None:
    billing_event = event()
    driver.stripe.fault("reset", stage="before")
    driver.step(billing_event)
    assert driver.resume(billing_event, driver.flow(STRIPE_CHARGE_API="charges")) == State.CHARGED
    _same_request_twice(driver)


def _same_request_twice(driver: Driver) -> None:
    first, second = driver.stripe.creates()
    assert first["idempotency_key"] == second["idempotency_key"]
    assert first["body_sha256"] == second["body_sha256"]
    assert first["path"] == second["path"]


# --- looking up --------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["before", "after_commit"])
def test_past_the_resend_window_a_charge_is_looked_up_not_sent(driver: Driver, stage: str) -> None:
    billing_event = event()
    driver.stripe.fault("reset", stage=stage)
    driver.step(billing_event)
    driver.pass_time(48 * 3600)
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
    billing_event = event()
    driver.stripe.fault("reset", stage="after_commit")
    driver.step(billing_event)
    assert driver.resume(billing_event, driver.flow(key="sk_test_rolled")) == State.CHARGED
    assert len(driver.stripe.creates()) == 1


def test_an_absent_charge_of_a_customer_who_is_gone_goes_to_a_person(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    billing_event = event(stripe_customer_id="cus_missing_1", payment_method="pm_card_visa")
    driver.stripe.fault("reset", stage="before")
    driver.step(billing_event)
    driver.pass_time(48 * 3600)
    assert driver.resume(billing_event) == State.REVIEW
    assert alarms(caplog) == ["alarm_review"]


def test_a_list_that_is_not_read_leaves_the_record_sent(driver: Driver) -> None:
    billing_event = event()
    driver.stripe.fault("reset", stage="after_commit")
    driver.step(billing_event)
    driver.pass_time(48 * 3600)
    driver.stripe.fault("http_500", method="GET")
    assert driver.resume(billing_event) == State.SENT
    assert driver.record(billing_event).error_code == "look_up_http_500"
    assert driver.resume(billing_event) == State.CHARGED


def test_a_charge_made_through_the_other_endpoint_is_found(driver: Driver) -> None:
    billing_event = event()
    driver.stripe.fault("reset", stage="after_commit")
    driver.step(billing_event, driver.flow(STRIPE_CHARGE_API="charges"))
    driver.pass_time(48 * 3600)
    assert driver.resume(billing_event) == State.CHARGED
    assert len(driver.stripe.charges()) == 1


# --- giving up ---------------------------------------------------------------------------------


def test_ten_claims_without_any_outcome_go_to_a_person(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    billing_event = event()
    new = new_record(billing_event)
    request = build_request(
        billing_event,
        new.charge_key,
        epoch=0,
        payment_method=None,
        key_id=driver.flow().gateway.key_id,
        namespace="stripe-billing",
    )
    claim = driver.ledger.claim_new(new, request, None)
    for _ in range(9):
        assert claim is not None
        driver.pass_time(10)
        claim = driver.ledger.claim(driver.record(billing_event), request, None)
    driver.pass_time(10)
    assert driver.resume(billing_event) == State.REVIEW
    assert alarms(caplog) == ["alarm_gave_up"]
    assert driver.stripe.requests() == []


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
