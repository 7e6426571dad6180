"""Open intents are asked about until they end. Guard: `Polling`, run by the sweep."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from models.states import State
from tasks.polling import BATCH, Polling
from tests.support.flows import PATIENT, Worker
from tests.support.roles import RoleStarter
from tests.support.stripe import Stripe
from tests.support.waiting import wait_until

PROCESSING = "cus_processing_1"
AUTH = "cus_auth_1"


@pytest.fixture
def worker(environment: dict[str, str], stripe: Stripe) -> Iterator[Worker]:
    made = Worker(environment, stripe, **PATIENT)
    yield made
    made.close()


@pytest.fixture
def polling(worker: Worker) -> Polling:
    return Polling(worker.actions, worker.here.gateway)


def poll_after(worker: Worker, polling: Polling, seconds: float) -> int:
    worker.pass_time(seconds)
    return polling.run()


@pytest.mark.parametrize("api", ["payment_intents", "charges"])
@pytest.mark.parametrize(
    ("outcome", "state"), [("succeeded", State.CHARGED), ("failed", State.CARD_DECLINED)]
)
def test_a_bank_debit_ends_as_it_settles(
    environment: dict[str, str], stripe: Stripe, api: str, outcome: str, state: State
) -> None:
    worker = Worker(environment, stripe, **PATIENT, STRIPE_CHARGE_API=api)
    polling = Polling(worker.actions, worker.here.gateway)
    worker.charge(PROCESSING)
    record = worker.record(PROCESSING)
    assert record.state is State.PROCESSING
    assert poll_after(worker, polling, worker.limits.poll_processing_s + 1) == 1
    assert worker.record(PROCESSING).state is State.PROCESSING, "not settled yet"
    stripe.settle(str(record.payment_intent_id or record.charge_id), outcome)
    assert poll_after(worker, polling, worker.limits.poll_processing_cap_s + 1) == 1
    assert worker.record(PROCESSING).state is state
    assert poll_after(worker, polling, 86_400) == 0, "it has ended"
    worker.close()


def test_a_customer_who_authenticates_is_charged_by_the_open_intent(
    worker: Worker, polling: Polling, stripe: Stripe
) -> None:
    worker.charge(AUTH)
    intent = str(worker.record(AUTH).payment_intent_id)
    assert poll_after(worker, polling, worker.limits.poll_action_s + 1) == 1
    assert worker.record(AUTH).state is State.REQUIRES_ACTION
    stripe.complete(intent)
    poll_after(worker, polling, worker.limits.poll_action_s + 1)
    record = worker.record(AUTH)
    assert (record.state, record.payment_intent_id) == (State.CHARGED, intent)
    assert len(worker.charges(AUTH)) == 1


def test_an_intent_that_was_canceled_is_a_known_failure(
    worker: Worker, polling: Polling, stripe: Stripe
) -> None:
    worker.charge(AUTH)
    stripe.form(f"/v1/payment_intents/{worker.record(AUTH).payment_intent_id}/cancel")
    poll_after(worker, polling, worker.limits.poll_action_s + 1)
    assert worker.record(AUTH).state is State.CARD_DECLINED


def test_a_charge_that_wanted_authentication_has_failed_for_good(
    environment: dict[str, str], stripe: Stripe
) -> None:
    worker = Worker(environment, stripe, **PATIENT, STRIPE_CHARGE_API="charges")
    polling = Polling(worker.actions, worker.here.gateway)
    worker.charge(AUTH)
    assert worker.record(AUTH).state is State.REQUIRES_ACTION
    poll_after(worker, polling, worker.limits.poll_action_s + 1)
    assert worker.record(AUTH).state is State.CARD_DECLINED
    worker.close()


def test_after_fourteen_days_a_person_decides(
    worker: Worker, polling: Polling, caplog: pytest.LogCaptureFixture
) -> None:
    worker.charge(AUTH)
    worker.charge(PROCESSING)
    poll_after(worker, polling, worker.limits.poll_for_s - 60)
    assert worker.record(AUTH).state is State.REQUIRES_ACTION
    poll_after(worker, polling, 120)
    assert {worker.record(AUTH).state, worker.record(PROCESSING).state} == {State.REVIEW}
    assert caplog.messages.count("alarm_review") == 2


def test_an_answer_that_does_not_come_changes_nothing(
    worker: Worker, polling: Polling, stripe: Stripe
) -> None:
    worker.charge(AUTH)
    path = f"/v1/payment_intents/{worker.record(AUTH).payment_intent_id}"
    stripe.fault("http_500", method="GET", path=path)
    poll_after(worker, polling, worker.limits.poll_action_s + 1)
    assert worker.record(AUTH).state is State.REQUIRES_ACTION
    stripe.complete(path.rpartition("/")[2])
    poll_after(worker, polling, 61)
    assert worker.record(AUTH).state is State.CHARGED


def test_more_than_one_batch_is_asked_about_in_one_sweep(
    worker: Worker, polling: Polling, stripe: Stripe
) -> None:
    customers = [f"cus_auth_{number}" for number in range(BATCH + 5)]
    for customer in customers:
        worker.charge(customer)
        stripe.complete(str(worker.record(customer).payment_intent_id))
    assert poll_after(worker, polling, worker.limits.poll_action_s + 1) == len(customers)
    assert {worker.record(customer).state for customer in customers} == {State.CHARGED}


def test_the_sweep_polls(worker: Worker, role: RoleStarter, stripe: Stripe) -> None:
    worker.charge(AUTH)
    stripe.complete(str(worker.record(AUTH).payment_intent_id))
    worker.pass_time(worker.limits.poll_action_s)
    role("worker-control", wait=False)
    role("beat", wait=False)
    wait_until(lambda: worker.record(AUTH).state is State.CHARGED, 80, "the sweep has asked")
