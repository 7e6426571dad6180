"""What went wrong for others where an outcome was not known, on our own flow.

Each test names the guard that it fails without.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from threading import Barrier
from urllib.parse import parse_qs

import pytest

from models.errors import StateForbids
from models.keys import charge_key
from models.ledger import Retry
from models.outcomes import OutcomeKind
from models.records import Record
from models.states import State
from tests.support.flows import PATIENT, PERIOD, Worker
from tests.support.ledgers import claimed, event, new_record, outcome
from tests.support.stripe import Stripe
from tests.support.waiting import wait_until

DAY_S = 86_400.0
WINDOW_S = 20 * 3600.0
AT_ONCE = 50


@pytest.fixture
def worker(environment: dict[str, str], stripe: Stripe) -> Iterator[Worker]:
    made = Worker(environment, stripe, **PATIENT)
    yield made
    made.close()


def settle(worker: Worker, customers: list[str], rounds: int = 12) -> None:
    """Drive these records as sweeps would, with time between, until all are settled."""
    for _ in range(rounds):
        done = [worker.drive(customer) for customer in customers]
        if all(word.startswith("skip") for word in done):
            return
        worker.pass_time(worker.limits.proof_of_absence_s + 1)
    raise AssertionError(done)


def test_omnipay_stripe_33_a_day_later_charges_are_adopted_or_made_once(
    worker: Worker, stripe: Stripe
) -> None:
    """Guard: `decide` looks up once the first send is older than the resend window."""
    taken = [f"cus_taken_{number}" for number in range(20)]
    never = [f"cus_never_{number}" for number in range(20)]
    for customer in taken:
        stripe.fault("reset", stage="after_commit", customer=customer)
        assert worker.charge(customer) == "sent"
    for customer in never:
        stripe.fault("reset", stage="after_claim", customer=customer)
        assert worker.charge(customer) == "sent"
    worker.pass_time(25 * 3600)
    settle(worker, [*taken, *never])
    charged = [charge["customer"] for charge in stripe.charges()]
    assert sorted(charged) == sorted([*taken, *never])
    for customer in taken:
        assert len(stripe.creates(charge_key=charge_key(customer, PERIOD))) == 1, "adopted"
    for customer in [*taken, *never]:
        assert worker.record(customer).state is State.CHARGED
        nothing_sent_late_without_a_list(stripe, customer)


def nothing_sent_late_without_a_list(stripe: Stripe, customer: str) -> None:
    """No create of a key first sent over 20 h before without a list read to its end between."""
    key = charge_key(customer, PERIOD)
    log = stripe.requests()
    creates = [(at, r) for at, r in enumerate(log) if r["charge_key"] == key]
    for (before, first), (after, second) in pairwise(creates):
        if second["at"] - creates[0][1]["at"] < WINDOW_S:
            continue
        assert first["idempotency_key"] == second["idempotency_key"]
        between = log[before:after]
        lists = [r for r in between if r["method"] == "GET" and is_list_of(r, customer)]
        assert lists, "asked before it was sent again"
        assert all(r["status"] == 200 for r in lists)


def is_list_of(request: dict[str, str], customer: str) -> bool:
    query = parse_qs(request["query"])
    return request["path"] == "/v1/payment_intents" and query.get("customer") == [customer]


def test_lago_3063_a_key_that_holds_another_amount_concludes_nothing(
    worker: Worker, stripe: Stripe, caplog: pytest.LogCaptureFixture
) -> None:
    """Guard: an IdempotencyError is looked up, and absence then goes to a person."""
    customer = "cus_edited_1"
    key = charge_key(customer, PERIOD)
    stripe.form(
        "/v1/payment_intents",
        {"Idempotency-Key": key},
        amount=500,
        currency="usd",
        customer=customer,
    )
    assert worker.charge(customer, amount_cents=501) == "sent"
    settle(worker, [customer])
    assert worker.record(customer).state is State.REVIEW
    assert "alarm_review" in caplog.messages
    assert worker.charges(customer) == []
    assert {r["idempotency_key"] for r in stripe.creates(charge_key=key)} == {key}


def test_stripe_node_559_a_key_that_answers_500_for_ever_ends_with_a_person(
    worker: Worker, stripe: Stripe
) -> None:
    """Guard: a replayed 500 makes the next step a look-up; absence is then no licence to send."""
    stripe.fault("http_500", stage="after_claim", customer="cus_stuck_1")
    worker.charge("cus_stuck_1")
    settle(worker, ["cus_stuck_1"])
    assert worker.record("cus_stuck_1").state is State.REVIEW
    assert len(stripe.creates()) == 2, "the first, one repeat, and no more"


@pytest.mark.parametrize("api", ["payment_intents", "charges"])
def test_payments_demo_43_a_customer_who_must_act_is_not_paid_and_not_tried_again(
    environment: dict[str, str], stripe: Stripe, api: str
) -> None:
    """Guard: 402 `authentication_required` is `requires_action`, which is settled."""
    worker = Worker(environment, stripe, **PATIENT, STRIPE_CHARGE_API=api)
    assert worker.charge("cus_auth_1") == "requires_action"
    worker.pass_time(DAY_S)
    assert worker.charge("cus_auth_1") == "skip:requires_action"
    assert worker.charges("cus_auth_1") == []
    assert len(stripe.creates()) == 1
    worker.close()


@pytest.mark.parametrize("api", ["payment_intents", "charges"])
def test_both_endpoints_are_looked_up_whatever_the_setting_says_by_then(
    environment: dict[str, str], stripe: Stripe, api: str
) -> None:
    """Guard: the endpoint is pinned by the stored request; lists are of the endpoints used."""
    other = {"payment_intents": "charges", "charges": "payment_intents"}[api]
    worker = Worker(environment, stripe, **PATIENT, STRIPE_CHARGE_API=api)
    stripe.fault("reset", stage="after_commit", customer="cus_1")
    assert worker.charge("cus_1") == "sent"
    worker.close()
    later = Worker(environment, stripe, **PATIENT, STRIPE_CHARGE_API=other)
    later.pass_time(25 * 3600)
    assert later.drive("cus_1") == "charged"
    assert len(stripe.creates()) == 1
    later.close()


def test_twenty_events_of_one_customer_at_once_with_lock_timeouts_are_all_charged(
    worker: Worker, stripe: Stripe
) -> None:
    """Guard: 429 `lock_timeout` is not executed: the same key later, and no slower pace for all."""
    stripe.fault("lock_timeout", customer="cus_busy", times=20)
    numbers = range(20)
    ids = [f"cust_{number}" for number in numbers]

    def deliver(customer_id: str) -> str:
        return worker.charge(customer_id, stripe_customer_id="cus_busy")

    with ThreadPoolExecutor(len(ids)) as pool:
        assert set(pool.map(deliver, ids)) == {"reserved"}
        worker.pass_time(worker.limits.backoff_cap_s)
        assert set(pool.map(deliver, ids)) == {"charged"}
    assert len(worker.charges("cus_busy")) == 20


# -- races, for real ---------------------------------------------------------------------


def test_fifty_workers_at_one_event_make_one_charge(worker: Worker, stripe: Stripe) -> None:
    """Guard: the claim, one statement on a unique row."""
    barrier = Barrier(AT_ONCE)

    def deliver(_: int) -> str:
        barrier.wait()
        return worker.charge("cus_raced_1")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(deliver, range(AT_ONCE)))
    wait_until(lambda: worker.record("cus_raced_1").state is State.CHARGED, 30, "it is charged")
    assert len(stripe.creates()) == 1


def test_the_sweep_and_redeliveries_at_once_send_once(worker: Worker, stripe: Stripe) -> None:
    """Guard: the claim expects the record as it was read."""
    stripe.fault("reset", stage="after_claim", customer="cus_raced_2")
    assert worker.charge("cus_raced_2") == "sent"
    worker.pass_time(worker.limits.backoff_cap_s)
    barrier = Barrier(AT_ONCE)

    def step(number: int) -> str:
        barrier.wait()
        return worker.charge("cus_raced_2") if number % 2 else worker.drive("cus_raced_2")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(step, range(AT_ONCE)))
    assert worker.record("cus_raced_2").state is State.CHARGED
    assert len(stripe.creates()) == 2, "the lost one, and one resend"
    assert len(worker.charges("cus_raced_2")) == 1


def test_a_recharge_and_a_late_success_at_once_never_lose_the_money(worker: Worker) -> None:
    """Guard: late truths; whichever is first, the record ends as charged or in review."""
    for number in range(AT_ONCE // 2):
        claim = claimed(worker.ledger, new_record(event(f"cust_{number}")))
        worker.ledger.record_outcome(claim, outcome(OutcomeKind.CARD_DECLINED), Retry(0.0))
        record = worker.record(f"cust_{number}")
        with ThreadPoolExecutor(2) as pool:
            barrier = Barrier(2)
            pool.submit(recharge_at, barrier, worker, record)
            pool.submit(late_success_at, barrier, worker, record)
        assert worker.record(f"cust_{number}").state in (State.CHARGED, State.REVIEW)


def recharge_at(barrier: Barrier, worker: Worker, record: Record) -> None:
    barrier.wait()
    with suppress(StateForbids):
        worker.actions.recharge(record, from_epoch=0, reason="x", request_id=record.charge_key)


def late_success_at(barrier: Barrier, worker: Worker, record: Record) -> None:
    barrier.wait()
    worker.ledger.late_truth(record.charge_key, outcome())
