"""Workers that charge through a vault: the real flow, a real vault process, the simulator."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from celery import Celery
from sqlalchemy.engine import Engine

from models.billing_runs import BillingRuns
from models.keys import charge_key
from models.ledger import Ledger
from models.ledger_reads import LedgerReads
from models.run_keys import RunKeys
from models.settings import load_settings
from models.states import State
from tasks.recharge_flow import Approval, Recharges
from tasks.sweep import Sweep
from tests.support import ledgers
from tests.support.faults import FaultPoints
from tests.support.flows import PERIOD, Worker
from tests.support.roles import RoleStarter
from tests.support.stripe import Stripe
from tests.support.vault import PATIENT, RUN, RUN_KEYS, Books, VaultProcess, vaulted_settings
from tests.support.vault_calls import HELD_S
from tests.support.vaulted_workers import AMOUNT, CAP, EXPECTED, MakeWorker, budget, charge, later
from tests.support.waiting import stays, wait_until

VAULT_ENV = PATIENT


def test_a_charge_goes_through_the_vault_and_settles_its_hold(
    vaulted_worker: Worker, books: Books, stripe: Stripe
) -> None:
    assert charge(vaulted_worker, "cus_good") == State.CHARGED
    assert charge(vaulted_worker, "cus_decline_generic_decline_1") == State.CARD_DECLINED
    assert len(vaulted_worker.charges("cus_good")) == 1
    assert budget(books) == (AMOUNT, 0)
    books.check()


def test_what_is_over_the_cap_is_blocked_and_charged_once_after_a_raise(
    vaulted_worker: Worker, runs: BillingRuns, books: Books, stripe: Stripe
) -> None:
    names = [f"cus_{number}" for number in range(6)]
    done = [charge(vaulted_worker, name) for name in names]
    assert done == [State.CHARGED] * 4 + [State.BLOCKED] * 2
    assert vaulted_worker.record(names[4]).error_code == "over_cap"
    report = runs.report(RUN, "usd")
    assert (report.blocked.records, report.run.free_cents) == (2, CAP - 4 * AMOUNT)
    assert not report.cap_will_hold
    runs.raise_cap(RUN, "usd", 2 * EXPECTED, "two more customers")
    published: list[str] = []

    def publish(key: str) -> bool:
        published.append(key)
        return True

    recharges = Recharges(vaulted_worker.actions, vaulted_worker.here.reads, publish)
    approval = Approval(reason="the cap was raised")
    lines = list(recharges.many(PERIOD, State.BLOCKED, approval, limit=10, dry_run=False))
    assert [line.done for line in lines] == [True, True]
    assert sorted(published) == sorted(charge_key(name, PERIOD) for name in names[4:])
    assert [vaulted_worker.drive(name) for name in names[4:]] == [State.CHARGED] * 2
    assert len(stripe.charges()) == 6
    assert budget(books) == (6 * AMOUNT, 0)


def test_an_event_without_a_run_waits_and_goes_on_when_the_run_is_opened(
    make_vaulted_worker: MakeWorker, runs: BillingRuns, stripe: Stripe
) -> None:
    worker = make_vaulted_worker()
    assert charge(worker, "cus_good") == "reserved:no_billing_run"
    assert charge(worker, "cus_method", payment_method="pm_card_visa") == "reserved:no_billing_run"
    assert later(worker, "cus_good") == "reserved:no_billing_run"
    assert worker.record("cus_good").error_code == "no_billing_run"
    runs.open("another", "usd", EXPECTED)
    assert later(worker, "cus_good") == "reserved:no_billing_run"
    assert stripe.creates() == []
    runs.open(RUN, "usd", EXPECTED)
    assert later(worker, "cus_good") == State.CHARGED
    assert later(worker, "cus_method") == State.CHARGED


def test_a_worker_that_may_opens_the_run_itself(
    make_vaulted_worker: MakeWorker, books: Books
) -> None:
    worker = make_vaulted_worker(RUN_AUTO_OPEN_EXPECTED_CENTS=str(EXPECTED))
    assert charge(worker, "cus_good") == State.CHARGED
    assert books.budget()["cap_cents"] == CAP


def test_a_renewed_key_is_read_again_and_blocks_nothing(
    vaulted_worker: Worker, runs: BillingRuns, books: Books
) -> None:
    assert charge(vaulted_worker, "cus_1") == State.CHARGED
    RunKeys(runs, RUN_KEYS).renew(RUN, "usd")
    assert charge(vaulted_worker, "cus_2") == State.CHARGED
    RunKeys(runs, RUN_KEYS).renew(RUN, "usd")
    books.revoke_keys_but_the_newest()
    assert charge(vaulted_worker, "cus_3") == State.CHARGED


def test_a_key_that_expired_or_is_unknown_waits_and_a_revoked_one_blocks(
    vaulted_worker: Worker, runs: BillingRuns, books: Books, stripe: Stripe
) -> None:
    assert charge(vaulted_worker, "cus_0") == State.CHARGED
    books.expire_keys()
    assert charge(vaulted_worker, "cus_1") == State.RESERVED
    assert vaulted_worker.record("cus_1").error_code == "key_expired"
    RunKeys(runs, RUN_KEYS).renew(RUN, "usd")
    assert later(vaulted_worker, "cus_1") == State.CHARGED
    books.forget_keys()
    assert charge(vaulted_worker, "cus_2").startswith("reserved")
    assert later(vaulted_worker, "cus_2").startswith("reserved")
    RunKeys(runs, RUN_KEYS).renew(RUN, "usd")
    assert later(vaulted_worker, "cus_2") == State.CHARGED
    books.revoke_keys()
    assert charge(vaulted_worker, "cus_3") == State.BLOCKED
    books.set_run_state("closing")
    RunKeys(runs, RUN_KEYS).renew(RUN, "usd")
    assert charge(vaulted_worker, "cus_4") == State.RESERVED
    assert vaulted_worker.record("cus_4").error_code == "run_closing"
    books.set_run_state("closed")
    assert later(vaulted_worker, "cus_4") == State.BLOCKED
    assert len(stripe.charges()) == 3


def test_without_the_vault_nothing_is_charged_and_everything_once_it_is_back(
    vaulted_worker: Worker, vault: VaultProcess, books: Books, stripe: Stripe
) -> None:
    assert charge(vaulted_worker, "cus_0") == State.CHARGED
    vault.kill()
    names = [f"cus_{number}" for number in range(1, 4)]
    # With a payment method nothing has to be read before the charge itself.
    done = [charge(vaulted_worker, name, payment_method="pm_card_visa") for name in names]
    assert done == [State.RESERVED] * 3
    assert len(stripe.creates()) == 1
    vault.restart()
    assert [later(vaulted_worker, name) for name in names] == [State.CHARGED] * 3
    assert all(len(vaulted_worker.charges(name)) == 1 for name in names)
    assert budget(books) == (4 * AMOUNT, 0)


@pytest.mark.parametrize("point", ["vault.before_send", "vault.after_answer"])
def test_a_vault_that_dies_around_the_send_charges_once(
    vaulted_worker: Worker,
    vault: VaultProcess,
    fault_point: FaultPoints,
    books: Books,
    point: str,
) -> None:
    fault_point(point, "kill")
    assert charge(vaulted_worker, "cus_good") == State.SENT
    wait_until(lambda: not vault.is_alive(), 30, "the vault is dead")
    vault.restart()
    assert later(vaulted_worker, "cus_good") == State.CHARGED
    assert len(vaulted_worker.charges("cus_good")) == 1
    assert budget(books) == (AMOUNT, 0)


class Load(threading.Thread):
    """A worker that charges one customer after the other until it is told to end."""

    def __init__(self, worker: Worker, name: str) -> None:
        super().__init__(daemon=True)
        self.worker = worker
        self.prefix = name
        self.done: list[str] = []
        self.ending = threading.Event()

    def run(self) -> None:
        while not self.ending.is_set():
            self.done.append(charge(self.worker, f"{self.prefix}x{len(self.done)}"))

    def begin_and_end_one(self) -> None:
        """Returns when a charge has ended that began after this call."""
        count = len(self.done) + 2
        wait_until(lambda: len(self.done) >= count, 60, f"a new charge of {self.prefix} has ended")


def test_a_key_that_is_renewed_under_load_loses_nothing(
    make_vaulted_worker: MakeWorker, runs: BillingRuns, books: Books, stripe: Stripe
) -> None:
    runs.open(RUN, "usd", 10_000 * AMOUNT)
    loads = [Load(make_vaulted_worker(), f"cus_{number}") for number in range(3)]
    for load in loads:
        load.start()
    keys = RunKeys(runs, RUN_KEYS)
    try:
        for _ in range(3):
            # No request may meet two renewals: that one would wait for its turn.
            for load in loads:
                load.begin_and_end_one()
            keys.renew(RUN, "usd")
        for load in loads:
            load.begin_and_end_one()
    finally:
        for load in loads:
            load.ending.set()
        for load in loads:
            load.join()
    done = [one for load in loads for one in load.done]
    assert done == [State.CHARGED] * len(done)
    assert len(stripe.charges()) == len(done)
    assert budget(books) == (len(done) * AMOUNT, 0)


def test_a_vault_that_is_killed_under_load_is_waited_for(
    role: RoleStarter,
    vault: VaultProcess,
    celery_broker_url: str,
    engine: Engine,
    books: Books,
    stripe: Stripe,
) -> None:
    vaulted = vaulted_settings(vault, RUN_AUTO_OPEN_EXPECTED_CENTS=str(1000 * AMOUNT))
    worker = role("worker", **vaulted)
    # Those after the first few are held at Stripe until the vault is killed.
    stripe.fault("latency", times=8, seconds=0.2)
    stripe.fault("latency", stage="after_claim", times=1000, seconds=HELD_S)
    events = [ledgers.event(customer_id=f"cust_{number}", billing_run=RUN) for number in range(40)]
    keys = [charge_key(one.customer_id, one.billing_period) for one in events]
    app = Celery("chargebridge-test", broker=celery_broker_url, set_as_current=False)

    def publish(key: str, given: dict[str, Any] | None = None) -> None:
        kwargs = {"event": given, "source": "nsq"}
        app.send_task("tasks.charge", args=[key], kwargs=kwargs, queue="charges")

    for key, one in zip(keys, events, strict=True):
        publish(key, one.to_json())
    wait_until(lambda: len(stripe.charges()) == 8 < len(stripe.creates()), 60, "calls under way")
    vault.kill()
    stripe.release()
    wait_until(lambda: len(stripe.charges()) > 8, 30, "Stripe takes money that no vault heard of")
    # What had been written to Stripe by then is read before this first question is answered;
    # nothing else begins.
    stripe.creates()
    begun = len(stripe.creates())
    sweep = Sweep(
        Ledger(engine, load_settings(worker.settings).limits, "test"), LedgerReads(engine), publish
    )
    stays(lambda: sweep.run() >= 0 and len(stripe.creates()) == begun, 4, "no charge around it")
    assert begun < len(keys)
    stripe.forget_faults()
    vault.restart()

    def all_charged() -> bool:
        sweep.run()
        found = sweep.ledger.read_statuses(keys)
        return len(found) == len(keys) and all(s.state is State.CHARGED for s in found.values())

    wait_until(all_charged, 60, "all are charged")
    app.close()
    charged = [one["metadata"]["charge_key"] for one in stripe.charges()]
    assert sorted(charged) == sorted(keys)
    assert budget(books) == (sum(one.amount_cents for one in events), 0)
