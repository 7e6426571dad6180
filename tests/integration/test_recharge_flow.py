"""A recharge is sent only when nothing of an earlier try can take money any more.

Guard of every test here: `EarlierObjects.clear` before each send of an epoch above 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from models.keys import charge_key
from models.states import State
from tests.support.flows import PATIENT, PERIOD, Worker
from tests.support.stripe import Stripe

BOTH = pytest.mark.parametrize("api", ["payment_intents", "charges"])


@pytest.fixture
def worker(environment: dict[str, str], stripe: Stripe) -> Iterator[Worker]:
    made = Worker(environment, stripe, **PATIENT)
    yield made
    made.close()


def cancels(stripe: Stripe) -> list[str]:
    return [r["path"] for r in stripe.requests(method="POST") if r["path"].endswith("/cancel")]


@BOTH
def test_a_new_card_is_charged_once_under_a_new_key(
    environment: dict[str, str], stripe: Stripe, api: str
) -> None:
    worker = Worker(environment, stripe, **PATIENT, STRIPE_CHARGE_API=api)
    customer = "cus_decline_insufficient_funds_1"
    worker.charge(customer)
    assert worker.record(customer).state is State.CARD_DECLINED
    worker.recharge(customer, payment_method="pm_card_visa")
    assert worker.drive(customer) == "charged"
    (charge,) = worker.charges(customer)
    first, second = stripe.creates(charge_key=charge_key(customer, PERIOD))
    assert first["idempotency_key"] != second["idempotency_key"] == charge["idempotency_key"]
    assert charge["metadata"]["attempt_epoch"] == "1"
    assert len(cancels(stripe)) == (api == "payment_intents"), "the declined intent is canceled"
    assert worker.drive(customer) == "skip:charged"
    worker.close()


def test_a_recharge_without_a_method_takes_the_customers_new_default(
    worker: Worker, stripe: Stripe
) -> None:
    customer = "cus_decline_expired_card_1"
    worker.charge(customer)
    stripe.change_customer(customer, default_payment_method="pm_card_visa")
    worker.recharge(customer)
    assert worker.drive(customer) == "charged"
    assert len(worker.charges(customer)) == 1


def test_an_earlier_intent_that_was_paid_meanwhile_is_adopted_and_nothing_is_sent(
    worker: Worker, stripe: Stripe
) -> None:
    customer = "cus_auth_1"
    worker.charge(customer)
    record = worker.record(customer)
    assert record.state is State.REQUIRES_ACTION
    assert record.payment_intent_id is not None
    worker.recharge(customer, payment_method="pm_card_visa")
    stripe.complete(record.payment_intent_id)
    assert worker.drive(customer) == "charged"
    assert worker.record(customer).payment_intent_id == record.payment_intent_id
    assert len(worker.charges(customer)) == 1
    assert len(stripe.creates(charge_key=record.charge_key)) == 1


def test_a_customer_who_pays_between_the_list_and_the_cancel_is_charged_once(
    worker: Worker, stripe: Stripe, monkeypatch: pytest.MonkeyPatch
) -> None:
    customer = "cus_auth_1"
    worker.charge(customer)
    record = worker.record(customer)
    worker.recharge(customer, payment_method="pm_card_visa")
    cancel = worker.here.gateway.cancel

    def paid_just_before(intent: str, deadline_s: float) -> object:
        stripe.complete(intent)
        return cancel(intent, deadline_s)

    monkeypatch.setattr(worker.here.gateway, "cancel", paid_just_before)
    assert worker.drive(customer) == "charged"
    assert worker.record(customer).payment_intent_id == record.payment_intent_id
    assert len(worker.charges(customer)) == 1


def test_a_cancel_that_fails_defers_the_recharge(worker: Worker, stripe: Stripe) -> None:
    customer = "cus_auth_1"
    worker.charge(customer)
    intent = worker.record(customer).payment_intent_id
    worker.recharge(customer, payment_method="pm_card_visa")
    path = f"/v1/payment_intents/{intent}/cancel"
    stripe.fault("http_429", path=path, times=3)
    assert worker.drive(customer) == "reserved:not_canceled"
    record = worker.record(customer)
    assert (record.state, record.deferrals, record.attempts) == (State.RESERVED, 1, 0)
    assert worker.charges(customer) == []
    worker.pass_time(worker.limits.backoff_cap_s)
    assert worker.drive(customer) == "charged"
    assert len(worker.charges(customer)) == 1


def test_a_list_that_cannot_be_read_defers_the_recharge(worker: Worker, stripe: Stripe) -> None:
    customer = "cus_decline_generic_decline_1"
    worker.charge(customer)
    worker.recharge(customer, payment_method="pm_card_visa")
    stripe.fault("http_500", method="GET", path="/v1/payment_intents")
    assert worker.drive(customer) == "reserved:http_500"
    assert worker.charges(customer) == []


def test_a_customer_whom_stripe_never_had_can_be_recharged_and_voided(worker: Worker) -> None:
    customer = "cus_missing_1"
    worker.charge(customer)
    assert worker.record(customer).state is State.REJECTED
    worker.recharge(customer, payment_method="pm_card_visa")
    assert worker.drive(customer) == "rejected"
    assert worker.record(customer).attempt_epoch == 1


def test_a_resend_of_a_recharge_lists_again_before_it_is_sent(
    worker: Worker, stripe: Stripe
) -> None:
    customer = "cus_decline_generic_decline_1"
    worker.charge(customer)
    worker.recharge(customer, payment_method="pm_card_visa")
    stripe.fault("reset", stage="after_commit", customer=customer)
    assert worker.drive(customer) == "sent"
    worker.pass_time(worker.limits.backoff_cap_s)
    # The first send did take the money: it is found, and nothing is sent again.
    assert worker.drive(customer) == "charged"
    assert len(worker.charges(customer)) == 1
    assert len(stripe.creates(charge_key=charge_key(customer, PERIOD))) == 2


def test_two_successes_of_one_charge_key_are_a_persons_matter(
    worker: Worker, stripe: Stripe, caplog: pytest.LogCaptureFixture
) -> None:
    customer = "cus_auth_1"
    worker.charge(customer)
    record = worker.record(customer)
    worker.recharge(customer, payment_method="pm_card_visa")
    stripe.complete(str(record.payment_intent_id))
    stripe.charge_elsewhere(customer, 2500, charge_key=record.charge_key)
    assert worker.drive(customer) == "review"
    assert "alarm_double_charge" in caplog.messages
    assert len(stripe.creates(idempotency_key=record.charge_key)) == 1


def test_money_of_another_amount_is_a_persons_matter(worker: Worker, stripe: Stripe) -> None:
    customer = "cus_decline_generic_decline_1"
    worker.charge(customer)
    record = worker.record(customer)
    worker.recharge(customer, payment_method="pm_card_visa")
    stripe.charge_elsewhere(customer, 9900, charge_key=record.charge_key)
    assert worker.drive(customer) == "review"


def test_an_open_intent_of_another_workers_send_is_not_canceled(
    worker: Worker, stripe: Stripe, monkeypatch: pytest.MonkeyPatch
) -> None:
    customer = "cus_decline_generic_decline_1"
    worker.charge(customer)
    worker.recharge(customer, payment_method="pm_auth_2")
    listed = worker.here.gateway.list_objects
    sends = ["once"]

    def sent_by_another(*args: object) -> object:
        if sends:
            sends.pop()
            # The other worker sends between this one's read of the record and its list.
            other = Worker(worker.environment, stripe, **PATIENT)
            assert other.drive(customer) == "requires_action"
            other.close()
        return listed(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(worker.here.gateway, "list_objects", sent_by_another)
    assert worker.drive(customer) == "leave:moved"
    record = worker.record(customer)
    assert record.state is State.REQUIRES_ACTION
    assert cancels(stripe) == [
        path for path in cancels(stripe) if record.payment_intent_id not in path
    ]
