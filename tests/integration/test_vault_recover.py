"""`ledger recover` with a vault: each charge is in its run's budget once, and ends there."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

import tasks.alarms
from models.billing_runs import BillingRuns, RunState
from models.errors import ChargebridgeError
from models.ledger_actions import ChargedRow
from models.states import State
from sandbox import clock
from tasks.deployment import pin_deployment
from tasks.polling import Polling
from tasks.recover import Recovered, Recovery
from tasks.sweep import watch_clock
from tests.support.flows import PERIOD, Worker
from tests.support.stripe import Stripe
from tests.support.vault import RUN, Books
from tests.support.vaulted_workers import AMOUNT, budget, charge, later

TWO_DAYS_S = 48 * 3600.0
YEAR_S = 365 * 86_400.0
DEBIT = "cus_processing_1"


def recover(worker: Worker) -> Recovered:
    since = datetime.now(UTC) - timedelta(hours=1)
    return Recovery(worker.actions, worker.here.gateway, worker.here.settings).run(since)


def poll(worker: Worker) -> int:
    return Polling(worker.actions, worker.here.gateway, worker.here.holds).run()


def adopted_debit(worker: Worker, books: Books) -> str:
    """A debit of the first epoch, as a recharge leaves it that finds it; its intent."""
    assert charge(worker, DEBIT) == State.PROCESSING
    with books.engine.connect() as connection:
        connection.execute(text("UPDATE billing_records SET attempt_epoch = 1"))
    intent = worker.record(DEBIT).payment_intent_id
    assert intent is not None
    return intent


@pytest.mark.parametrize("adopts_first", [True, False])
def test_an_earlier_epochs_money_is_counted_once(
    vaulted_worker: Worker, books: Books, stripe: Stripe, adopts_first: bool
) -> None:
    """Guard: the hold is that of the object's epoch, not of the record's."""
    assert charge(vaulted_worker, "cus_auth_1") == State.REQUIRES_ACTION
    intent = vaulted_worker.record("cus_auth_1").payment_intent_id
    assert intent is not None
    vaulted_worker.recharge("cus_auth_1")
    stripe.complete(intent)
    if adopts_first:
        assert vaulted_worker.drive("cus_auth_1") == State.CHARGED
    recover(vaulted_worker)
    vaulted_worker.here.holds.resolve_left(vaulted_worker.here.engine)
    assert vaulted_worker.record("cus_auth_1").state is State.CHARGED
    assert budget(books) == (AMOUNT, 0)
    assert len(stripe.charges()) == 1
    books.check()


@pytest.mark.parametrize("recovers", [True, False])
def test_a_debit_of_an_earlier_epoch_settles_its_own_hold(
    vaulted_worker: Worker,
    books: Books,
    stripe: Stripe,
    runs: BillingRuns,
    caplog: pytest.LogCaptureFixture,
    recovers: bool,
) -> None:
    intent = adopted_debit(vaulted_worker, books)
    if recovers:
        recover(vaulted_worker)
    stripe.settle(intent)
    vaulted_worker.pass_time(10)
    assert poll(vaulted_worker) == 1
    vaulted_worker.here.holds.resolve_left(vaulted_worker.here.engine)
    assert "alarm_hold_missing" not in caplog.text
    assert budget(books) == (AMOUNT, 0)
    assert runs.close(RUN, "usd").state is RunState.CLOSED


@pytest.mark.parametrize(
    ("customer", "stage", "end"),
    [
        ("cus_good_1", "before", State.RESERVED),
        ("cus_decline_expired_card", "after_commit", State.CARD_DECLINED),
    ],
)
def test_a_hold_that_a_wrong_clock_wrote_can_be_let_go(
    vaulted_worker: Worker, books: Books, stripe: Stripe, customer: str, stage: str, end: State
) -> None:
    url = vaulted_worker.environment["DATABASE_URL"]
    clock.advance(url, TWO_DAYS_S)
    stripe.fault("reset", stage=stage, customer=customer)
    assert charge(vaulted_worker, customer) == State.SENT
    clock.advance(url, -TWO_DAYS_S)
    recover(vaulted_worker)
    assert later(vaulted_worker, customer, vaulted_worker.limits.proof_of_absence_s + 1) == end
    assert budget(books) == (0, 0)


def test_an_open_intent_that_a_wrong_clock_wrote_is_polled(
    vaulted_worker: Worker, stripe: Stripe, books: Books, caplog: pytest.LogCaptureFixture
) -> None:
    url = vaulted_worker.environment["DATABASE_URL"]
    assert charge(vaulted_worker, DEBIT) == State.PROCESSING
    with books.engine.connect() as connection:
        ahead = ", ".join(
            f"{name} = {name} + interval '400 days'"
            for name in ("updated_at", "settled_at", "next_attempt_at")
        )
        connection.execute(text(f"UPDATE billing_records SET {ahead}"))
    clock.install(url)
    tasks.alarms._rung_at_s.clear()
    watch_clock(vaulted_worker.here.engine)
    assert "alarm_clock" in caplog.text
    recover(vaulted_worker)
    intent = vaulted_worker.record(DEBIT).payment_intent_id
    assert intent is not None
    stripe.settle(intent)
    assert poll(vaulted_worker) == 1
    assert vaulted_worker.record(DEBIT).state is State.CHARGED


def test_without_a_vault_of_our_own_no_hold_is_made(
    environment: dict[str, str], stripe: Stripe, books: Books, runs: BillingRuns
) -> None:
    runs.open(RUN, "usd", 10_000)
    worker = Worker(environment, stripe)
    stripe.fault("reset", stage="before", customer="cus_good_1")
    assert charge(worker, "cus_good_1") == State.SENT
    recover(worker)
    assert books.holds() == []
    worker.close()


def test_a_run_that_the_copy_does_not_know_is_named_before_its_money_is_forgotten(
    vaulted_worker: Worker, stripe: Stripe, books: Books, runs: BillingRuns
) -> None:
    runs.open("another", "usd", 10_000)
    for number in range(2):
        assert charge(vaulted_worker, f"cus_good_{number}") == State.CHARGED
        vaulted_worker.forget(f"cus_good_{number}")
    with books.engine.connect() as connection:
        for table in ("vault_holds", "vault_keys", "billing_run_events"):
            connection.execute(text(f"DELETE FROM {table}"))
        connection.execute(text("DELETE FROM billing_runs WHERE billing_run = :run"), {"run": RUN})
        connection.execute(text("UPDATE billing_runs SET vault_key_encrypted = NULL"))
    restored = Worker(vaulted_worker.environment, stripe)
    pin_deployment(restored.here)
    with pytest.raises(ChargebridgeError, match=rf"in the run {RUN} \(usd\): `run open` it"):
        recover(restored)
    assert restored.here.reads.recovering(), "no worker starts"
    runs.open(RUN, "usd", 10_000)
    assert recover(restored).seen == 2
    assert budget(books) == (2 * AMOUNT, 0)
    restored.close()


def test_what_was_imported_or_charged_before_the_vault_stays_out_of_the_budget(
    vaulted_worker: Worker, books: Books
) -> None:
    row = ChargedRow(
        customer_id="cust_old",
        billing_period=PERIOD,
        charge_key="0" * 32,
        fingerprint="f",
        amount_cents=AMOUNT,
        currency="usd",
        stripe_customer_id="cus_old",
        billing_run=RUN,
        payment_intent_id=None,
        charge_id="ch_old",
    )
    vaulted_worker.actions.import_charges([(1, row)])
    assert charge(vaulted_worker, "cus_good_1") == State.CHARGED
    assert charge(vaulted_worker, "cus_good_2") == State.CHARGED
    with books.engine.connect() as connection:
        connection.execute(
            text(
                "UPDATE billing_records SET updated_at = updated_at - interval '2 days'"
                " WHERE customer_id = 'cus_good_2'"
            )
        )
        connection.execute(
            text("DELETE FROM vault_holds WHERE charge_key = :key"),
            {"key": vaulted_worker.record("cus_good_2").charge_key},
        )
        connection.execute(text("UPDATE billing_runs SET settled_cents = :one"), {"one": AMOUNT})
    recover(vaulted_worker)
    assert budget(books) == (AMOUNT, 0)
