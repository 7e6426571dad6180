"""Workers that charge through a vault: the real flow, a real vault process, the simulator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from celery import Celery
from sqlalchemy.engine import Engine

from models.billing_runs import BillingRuns
from models.errors import ChargebridgeError
from models.keys import charge_key
from models.ledger import Ledger
from models.ledger_reads import LedgerReads
from models.run_keys import RunKeys
from models.settings import load_settings
from models.states import State
from models.vault_wire import VaultWire
from tasks.manual import Manual
from tasks.polling import Polling
from tasks.recharge_flow import Approval, Recharges
from tasks.reconcile import reconciliation
from tasks.sweep import Sweep
from tasks.vault_holds import VaultHolds
from tests.support import ledgers
from tests.support.faults import FaultPoints
from tests.support.flows import PERIOD, Worker
from tests.support.roles import RoleStarter
from tests.support.stripe import Stripe
from tests.support.vault import ADMIN_KEY, RUN, RUN_KEYS, Books, VaultProcess, vaulted_settings
from tests.support.waiting import stays, wait_until

EXPECTED = 10_000
CAP = 11_000
AMOUNT = 2_500
MakeWorker = Callable[..., Worker]


@pytest.fixture
def make_worker(
    environment: dict[str, str], stripe: Stripe, vault: VaultProcess
) -> Iterator[MakeWorker]:
    """Workers that have no key of Stripe's own."""
    made: list[Worker] = []

    def make(**env: str) -> Worker:
        made.append(Worker(environment, stripe, **vaulted_settings(vault, **env)))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


@pytest.fixture
def runs(engine: Engine) -> BillingRuns:
    return BillingRuns(engine, "test")


@pytest.fixture
def worker(make_worker: MakeWorker, runs: BillingRuns) -> Worker:
    """A worker, and the run open."""
    runs.open(RUN, "usd", EXPECTED)
    return make_worker()


def charge(worker: Worker, customer: str, **fields: Any) -> str:
    return worker.charge(customer, billing_run=RUN, **fields)


def later(worker: Worker, customer: str, seconds: float = 10) -> str:
    worker.pass_time(seconds)
    return worker.drive(customer)


def budget(books: Books) -> tuple[int, int]:
    found = books.budget()
    return found["settled_cents"], found["held_cents"]


def test_a_charge_goes_through_the_vault_and_settles_its_hold(
    worker: Worker, books: Books, stripe: Stripe
) -> None:
    assert charge(worker, "cus_good") == State.CHARGED
    assert charge(worker, "cus_decline_generic_decline_1") == State.CARD_DECLINED
    assert len(worker.charges("cus_good")) == 1
    assert budget(books) == (AMOUNT, 0)
    books.check()


def test_what_is_over_the_cap_is_blocked_and_charged_once_after_a_raise(
    worker: Worker, runs: BillingRuns, books: Books, stripe: Stripe
) -> None:
    names = [f"cus_{number}" for number in range(6)]
    done = [charge(worker, name) for name in names]
    assert done == [State.CHARGED] * 4 + [State.BLOCKED] * 2
    assert worker.record(names[4]).error_code == "over_cap"
    report = runs.report(RUN, "usd")
    assert (report.blocked.records, report.run.free_cents) == (2, CAP - 4 * AMOUNT)
    assert not report.cap_will_hold
    runs.raise_cap(RUN, "usd", 2 * EXPECTED, "two more customers")
    published: list[str] = []

    def publish(key: str) -> bool:
        published.append(key)
        return True

    recharges = Recharges(worker.actions, worker.here.reads, publish)
    approval = Approval(reason="the cap was raised")
    lines = list(recharges.many(PERIOD, State.BLOCKED, approval, limit=10, dry_run=False))
    assert [line.done for line in lines] == [True, True]
    assert sorted(published) == sorted(charge_key(name, PERIOD) for name in names[4:])
    assert [worker.drive(name) for name in names[4:]] == [State.CHARGED] * 2
    assert len(stripe.charges()) == 6
    assert budget(books) == (6 * AMOUNT, 0)


def test_an_event_without_a_run_waits_and_goes_on_when_the_run_is_opened(
    make_worker: MakeWorker, runs: BillingRuns, stripe: Stripe
) -> None:
    worker = make_worker()
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


def test_a_worker_that_may_opens_the_run_itself(make_worker: MakeWorker, books: Books) -> None:
    worker = make_worker(RUN_AUTO_OPEN_EXPECTED_CENTS=str(EXPECTED))
    assert charge(worker, "cus_good") == State.CHARGED
    assert books.budget()["cap_cents"] == CAP


def test_a_renewed_key_is_read_again_and_blocks_nothing(
    worker: Worker, runs: BillingRuns, books: Books
) -> None:
    assert charge(worker, "cus_1") == State.CHARGED
    RunKeys(runs, RUN_KEYS).renew(RUN, "usd")
    assert charge(worker, "cus_2") == State.CHARGED
    RunKeys(runs, RUN_KEYS).renew(RUN, "usd")
    books.revoke_keys_but_the_newest()
    assert charge(worker, "cus_3") == State.CHARGED


def test_a_key_that_expired_or_is_unknown_waits_and_a_revoked_one_blocks(
    worker: Worker, runs: BillingRuns, books: Books, stripe: Stripe
) -> None:
    assert charge(worker, "cus_0") == State.CHARGED
    books.expire_keys()
    assert charge(worker, "cus_1") == State.RESERVED
    assert worker.record("cus_1").error_code == "key_expired"
    RunKeys(runs, RUN_KEYS).renew(RUN, "usd")
    assert later(worker, "cus_1") == State.CHARGED
    books.forget_keys()
    assert charge(worker, "cus_2").startswith("reserved")
    assert later(worker, "cus_2").startswith("reserved")
    RunKeys(runs, RUN_KEYS).renew(RUN, "usd")
    assert later(worker, "cus_2") == State.CHARGED
    books.revoke_keys()
    assert charge(worker, "cus_3") == State.BLOCKED
    books.set_run_state("closing")
    RunKeys(runs, RUN_KEYS).renew(RUN, "usd")
    assert charge(worker, "cus_4") == State.RESERVED
    assert worker.record("cus_4").error_code == "run_closing"
    books.set_run_state("closed")
    assert later(worker, "cus_4") == State.BLOCKED
    assert len(stripe.charges()) == 3


def test_without_the_vault_nothing_is_charged_and_everything_once_it_is_back(
    worker: Worker, vault: VaultProcess, books: Books, stripe: Stripe
) -> None:
    assert charge(worker, "cus_0") == State.CHARGED
    vault.kill()
    names = [f"cus_{number}" for number in range(1, 4)]
    # With a payment method nothing has to be read before the charge itself.
    done = [charge(worker, name, payment_method="pm_card_visa") for name in names]
    assert done == [State.RESERVED] * 3
    assert len(stripe.creates()) == 1
    vault.restart()
    assert [later(worker, name) for name in names] == [State.CHARGED] * 3
    assert all(len(worker.charges(name)) == 1 for name in names)
    assert budget(books) == (4 * AMOUNT, 0)


@pytest.mark.parametrize("point", ["vault.before_send", "vault.after_answer"])
def test_a_vault_that_dies_around_the_send_charges_once(
    worker: Worker,
    vault: VaultProcess,
    fault_point: FaultPoints,
    books: Books,
    point: str,
) -> None:
    fault_point(point, "kill")
    assert charge(worker, "cus_good") == State.SENT
    wait_until(lambda: not vault.is_alive(), 10, "the vault is dead")
    vault.restart()
    assert later(worker, "cus_good") == State.CHARGED
    assert len(worker.charges("cus_good")) == 1
    assert budget(books) == (AMOUNT, 0)


def test_a_look_up_goes_through_the_vault_and_tells_it_first(
    worker: Worker, vault: VaultProcess, fault_point: FaultPoints, books: Books, stripe: Stripe
) -> None:
    fault_point("vault.after_answer", "kill")
    assert charge(worker, "cus_taken") == State.SENT
    wait_until(lambda: not vault.is_alive(), 10, "the vault is dead")
    vault.restart()
    fault_point("vault.before_send", "kill")
    assert charge(worker, "cus_absent") == State.SENT
    wait_until(lambda: not vault.is_alive(), 10, "the vault is dead")
    worker.pass_time(25 * 3600)
    # Neither the lists nor the holds can be reached: nothing is decided.
    assert worker.drive("cus_taken") == State.SENT
    vault.restart()
    sent = len(stripe.creates())
    assert later(worker, "cus_taken", 60) == State.CHARGED
    assert later(worker, "cus_absent", 60) == State.RESERVED
    assert len(stripe.creates()) == sent
    assert budget(books) == (AMOUNT, 0)
    assert later(worker, "cus_absent") == State.CHARGED
    assert budget(books) == (2 * AMOUNT, 0)
    books.check()


def test_an_open_intent_keeps_its_hold_until_it_is_known_what_became_of_it(
    worker: Worker, books: Books, stripe: Stripe
) -> None:
    assert charge(worker, "cus_processing_1") == State.PROCESSING
    assert budget(books) == (0, AMOUNT)
    intent = worker.record("cus_processing_1").payment_intent_id
    assert intent is not None
    stripe.settle(intent)
    worker.pass_time(10)
    Polling(worker.actions, worker.here.gateway, worker.here.holds).run()
    assert worker.record("cus_processing_1").state is State.CHARGED
    assert budget(books) == (AMOUNT, 0)


def test_an_intent_that_died_elsewhere_does_not_stand_in_a_recharges_way(
    worker: Worker, books: Books, stripe: Stripe
) -> None:
    assert charge(worker, "cus_auth_1") == State.REQUIRES_ACTION
    assert budget(books) == (0, AMOUNT)
    stripe.form(f"/v1/payment_intents/{worker.record('cus_auth_1').payment_intent_id}/cancel")
    worker.recharge("cus_auth_1", payment_method="pm_card_visa")
    assert worker.drive("cus_auth_1") == State.CHARGED
    assert budget(books) == (AMOUNT, 0)
    assert len(worker.charges("cus_auth_1")) == 1


def test_what_a_person_resolves_is_told_to_the_vault_first(
    worker: Worker, vault: VaultProcess, books: Books, stripe: Stripe
) -> None:
    here = worker.here
    manual = Manual(
        worker.actions,
        worker.ledger,
        here.reads,
        here.gateway,
        here.settings.charge_namespace,
        holds=here.holds,
    )
    names = ("cus_processing_1", "cus_processing_2")
    assert [charge(worker, name) for name in names] == [State.PROCESSING] * 2
    worker.pass_time(15 * 24 * 3600)
    Polling(worker.actions, here.gateway, here.holds).run()
    taken, failed = (worker.record(name) for name in names)
    assert (taken.state, failed.state) == (State.REVIEW, State.REVIEW)
    assert budget(books) == (0, 2 * AMOUNT)
    assert taken.payment_intent_id is not None
    assert failed.payment_intent_id is not None
    stripe.settle(taken.payment_intent_id)
    stripe.settle(failed.payment_intent_id, "failed")
    vault.kill()
    with pytest.raises(ChargebridgeError):
        manual.resolve_not_charged(names[1], PERIOD, "the bank said no")
    assert worker.record(names[1]).state is State.REVIEW
    vault.restart()
    manual.resolve_charged(names[0], PERIOD, taken.payment_intent_id, "the bank said yes")
    manual.resolve_not_charged(names[1], PERIOD, "the bank said no")
    assert [worker.record(name).state for name in names] == [State.CHARGED, State.REJECTED]
    assert budget(books) == (AMOUNT, 0)


def test_the_sweep_resolves_what_a_settled_record_has_left_held(
    worker: Worker, books: Books
) -> None:
    assert charge(worker, "cus_good") == State.CHARGED
    books.forget_outcome(charge_key("cus_good", PERIOD))
    assert budget(books) == (0, AMOUNT)
    assert worker.here.holds.resolve_left(worker.here.engine) == 1
    assert budget(books) == (AMOUNT, 0)
    assert worker.here.holds.resolve_left(worker.here.engine) == 0


def test_a_charge_that_reconcile_finds_settles_its_hold_though_it_was_released(
    worker: Worker, books: Books
) -> None:
    assert charge(worker, "cus_good") == State.CHARGED
    key = charge_key("cus_good", PERIOD)
    books.give_back(key)
    assert budget(books) == (0, 0)
    worker.forget("cus_good")
    with reconciliation(worker.here, RUN, "test") as work:
        work.run()
        assert work.summary().adopted == 1
    assert worker.record("cus_good").state is State.CHARGED
    assert budget(books) == (AMOUNT, 0)


def test_a_charge_that_reconcile_finds_is_not_adopted_before_the_vault_knows(
    worker: Worker, books: Books, vault: VaultProcess
) -> None:
    assert charge(worker, "cus_good") == State.CHARGED
    worker.forget("cus_good")
    wire = VaultWire("http://127.0.0.1:9", ADMIN_KEY)
    unheard = replace(worker.here, holds=VaultHolds(wire, worker.here.settings.charge_namespace))
    with (
        reconciliation(unheard, RUN, "test") as work,
        pytest.raises(ChargebridgeError, match="the vault could not be told"),
    ):
        work.run()
    assert worker.here.reads.by_keys([charge_key("cus_good", PERIOD)]) == []


def test_a_key_that_is_renewed_under_load_loses_nothing(
    make_worker: MakeWorker, runs: BillingRuns, books: Books, stripe: Stripe
) -> None:
    runs.open(RUN, "usd", 100 * AMOUNT)
    done: list[str] = []

    def work(number: int) -> None:
        worker = make_worker()
        for step in range(10):
            take(worker, f"cus_{number}x{step}")

    def take(worker: Worker, name: str) -> None:
        done.append(charge(worker, name))

    def reached(count: int) -> bool:
        return len(done) >= count

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    keys = RunKeys(runs, RUN_KEYS)
    for count in (4, 12, 20):
        # Far enough apart that no request meets two of them: that one would wait for its turn.
        wait_until(partial(reached, count), 60, f"{count} charges")
        keys.renew(RUN, "usd")
    for thread in threads:
        thread.join()
    assert done == [State.CHARGED] * 30
    assert len(stripe.charges()) == 30
    assert budget(books) == (30 * AMOUNT, 0)


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
    stripe.fault("latency", times=1000, seconds=0.2)
    events = [ledgers.event(customer_id=f"cust_{number}", billing_run=RUN) for number in range(40)]
    keys = [charge_key(one.customer_id, one.billing_period) for one in events]
    app = Celery("chargebridge-test", broker=celery_broker_url, set_as_current=False)

    def publish(key: str, given: dict[str, Any] | None = None) -> None:
        kwargs = {"event": given, "source": "nsq"}
        app.send_task("tasks.charge", args=[key], kwargs=kwargs, queue="charges")

    for key, one in zip(keys, events, strict=True):
        publish(key, one.to_json())
    wait_until(lambda: len(stripe.charges()) >= 8, 40, "charges under way")
    vault.kill()
    # What had reached Stripe by then may end; nothing else begins.
    begun = len(stripe.creates())
    sweep = Sweep(
        Ledger(engine, load_settings(worker.settings).limits, "test"), LedgerReads(engine), publish
    )
    stays(lambda: sweep.run() >= 0 and len(stripe.creates()) == begun, 4, "no charge around it")
    assert begun < len(keys)
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
