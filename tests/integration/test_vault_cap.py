"""The cap under concurrency, and when vaults die or freeze in the middle of a charge."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import urllib3
from sqlalchemy import text
from sqlalchemy.engine import Engine

from sandbox import clock
from tests.support.faults import FaultPoints
from tests.support.services import Services
from tests.support.stripe import Stripe
from tests.support.vault import RUN, Books, VaultProcess, VaultStarter
from tests.support.waiting import wait_until

CLIENTS = 64
TRIES = 400
FITS = 100
AMOUNT = 2500
CAP = FITS * AMOUNT + AMOUNT - 1

SAMPLE = text(
    "SELECT cap_cents - settled_cents - held_cents AS free, "
    "(SELECT COALESCE(sum(amount_cents), 0) FROM vault_holds WHERE state <> 'released') AS used "
    "FROM billing_runs"
)


class CapWatch:
    """Samples the budget for as long as the test runs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.samples = 0
        self.worst_free = CAP
        self.most_used = 0

    def __enter__(self) -> CapWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with self._engine.connect() as connection:
            while not self._stop.wait(0.005):
                for free, used in connection.execute(SAMPLE):
                    self.samples += 1
                    self.worst_free = min(self.worst_free, free)
                    self.most_used = max(self.most_used, used)


def test_s5_exactly_as_many_charges_pass_as_fit_under_the_cap(
    vault_starter: VaultStarter, stripe: Stripe, books: Books, engine: Engine
) -> None:
    """64 clients on two vaults, 400 tries of distinct charges, room for 100."""
    vaults = [vault_starter(), vault_starter()]
    key = vaults[0].issue(cap_cents=CAP)

    def charge(number: int) -> str | None:
        return vaults[number % 2].create(key, f"c{number}").code

    with CapWatch(engine) as watch, ThreadPoolExecutor(CLIENTS) as threads:
        codes = Counter(threads.map(charge, range(TRIES)))
    assert codes == {None: FITS, "over_cap": TRIES - FITS}
    assert watch.samples > 10
    assert watch.worst_free >= 0
    assert watch.most_used <= CAP
    assert len(stripe.charges()) == FITS
    books.check()


def test_one_charge_tried_by_many_at_once_is_one_hold(
    vault_starter: VaultStarter, stripe: Stripe, books: Books
) -> None:
    vaults = [vault_starter(), vault_starter()]
    key = vaults[0].issue(cap_cents=AMOUNT)
    with ThreadPoolExecutor(16) as threads:
        replies = list(threads.map(lambda n: vaults[n % 2].create(key, "c1"), range(32)))
    assert {reply.status for reply in replies} <= {200, 409}
    assert [h["state"] for h in books.holds()] == ["settled"]
    assert books.budget()["settled_cents"] == AMOUNT
    assert len(stripe.charges()) == 1


def test_epochs_of_one_charge_tried_at_once_leave_one_live_hold(
    vault: VaultProcess, stripe: Stripe, books: Books
) -> None:
    key = vault.issue()
    with ThreadPoolExecutor(16) as threads:
        codes = list(
            threads.map(
                lambda n: vault.create(key, "c1", idempotency_key=f"k{n}", epoch=str(n)).code,
                range(16),
            )
        )
    assert Counter(codes) == {None: 1, "other_hold_live": 15}
    assert len(stripe.charges()) == 1
    books.check()


def test_released_holds_taken_again_at_once_are_counted_once(
    vault: VaultProcess, stripe: Stripe, books: Books
) -> None:
    key = vault.issue(cap_cents=AMOUNT)
    stripe.fault("http_429", idempotency_key="c1")
    vault.create(key, "c1")
    with ThreadPoolExecutor(16) as threads:
        codes = set(threads.map(lambda _: vault.create(key, "c1").code, range(16)))
    assert None in codes
    assert codes <= {None, "idempotency_key_in_use"}
    assert books.budget() == {"cap_cents": AMOUNT, "settled_cents": AMOUNT, "held_cents": 0}
    books.check()


@pytest.mark.parametrize(
    ("point", "state", "held", "taken"),
    [
        ("vault.before_hold", None, 0, 0),
        ("vault.after_hold", "reserved", AMOUNT, 0),
        ("vault.before_send", "sent", AMOUNT, 0),
        ("vault.after_answer", "sent", AMOUNT, 1),
        ("vault.after_outcome", "settled", 0, 1),
    ],
)
def test_a_vault_that_is_killed_loses_no_hold_and_charges_nothing_twice(
    vault: VaultProcess,
    stripe: Stripe,
    books: Books,
    fault_point: FaultPoints,
    point: str,
    state: str | None,
    held: int,
    taken: int,
) -> None:
    key = vault.issue(cap_cents=AMOUNT)
    fault_point(point, "kill")
    with pytest.raises(urllib3.exceptions.HTTPError):
        vault.create(key, "c1")
    wait_until(lambda: not vault.is_alive(), 5, "the vault is dead")
    assert [h["state"] for h in books.holds()] == ([state] if state else [])
    assert books.budget()["held_cents"] == held
    assert len(stripe.charges()) == taken
    vault.restart()
    if state:
        assert vault.create(key, "c2").code == "over_cap"
    assert vault.create(key, "c1").json["status"] == "succeeded"
    assert books.budget() == {"cap_cents": AMOUNT, "settled_cents": AMOUNT, "held_cents": 0}
    assert len(stripe.charges()) == 1
    books.check()


def test_a_forward_that_died_with_its_vault_holds_up_no_release_for_ever(
    vault: VaultProcess,
    stripe: Stripe,
    books: Books,
    fault_point: FaultPoints,
    database_url: str,
) -> None:
    key = vault.issue()
    fault_point("vault.before_send", "kill")
    with pytest.raises(urllib3.exceptions.HTTPError):
        vault.create(key, "c1")
    vault.restart()
    assert vault.resolve("c1", "absent").code == "hold_not_resolvable"
    clock.advance(database_url, 60)
    assert vault.resolve("c1", "absent").status == 200
    assert books.hold("c1")["state"] == "released"
    assert vault.create(key, "c1").status == 200
    assert len(stripe.charges()) == 1


def test_a_forward_that_died_long_ago_does_not_keep_a_declined_charge_held(
    vault: VaultProcess,
    stripe: Stripe,
    books: Books,
    fault_point: FaultPoints,
    database_url: str,
) -> None:
    key = vault.issue()
    method = "pm_decline_expired_card"
    fault_point("vault.before_send", "kill")
    with pytest.raises(urllib3.exceptions.HTTPError):
        vault.create(key, "c1", payment_method=method)
    vault.restart()
    clock.advance(database_url, 20)
    stripe.fault("reset", stage="after_commit", idempotency_key="c1")
    vault.create(key, "c1", payment_method=method)
    clock.advance(database_url, 20)
    assert vault.create(key, "c1", payment_method=method).status == 402
    assert books.hold("c1")["state"] == "released"
    assert books.budget()["held_cents"] == 0


def test_a_frozen_vault_holds_up_no_other(
    vault_starter: VaultStarter, stripe: Stripe, books: Books, fault_point: FaultPoints
) -> None:
    frozen, other = vault_starter(), vault_starter()
    key = frozen.issue()
    for point in ("vault.after_hold", "vault.before_send", "vault.after_answer"):
        charge_key = point.removeprefix("vault.")
        fault_point(point, "freeze")
        with ThreadPoolExecutor(1) as threads:
            stuck = threads.submit(frozen.create, key, charge_key)
            fault_point.wait_reached(point)
            assert other.create(key, f"other-{charge_key}").status == 200
            assert other.create(key, charge_key).json["status"] == "succeeded"
            frozen.signal(signal.SIGCONT)
            assert stuck.result().status == 200
    assert len(stripe.charges()) == 6
    books.check()


def test_a_vault_that_slept_before_its_commit_does_not_send_what_was_given_up_meanwhile(
    vault: VaultProcess, stripe: Stripe, books: Books, fault_point: FaultPoints
) -> None:
    key = vault.issue()
    fault_point("vault.after_hold", "hold")
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(vault.create, key, "c1")
        fault_point.wait_reached("vault.after_hold")
        assert vault.resolve("c1", "absent").status == 200
        paused = threading.Event()
        paused.wait(10.5)
        fault_point.release("vault.after_hold")
        reply = late.result()
    assert (reply.status, reply.code, reply.forwarded) == (503, "busy", "no")
    assert stripe.requests() == []
    assert books.hold("c1")["state"] == "released"
    assert vault.create(key, "c1").status == 200


def test_a_vault_that_slept_after_its_commit_does_not_send(
    vault: VaultProcess, stripe: Stripe, books: Books, fault_point: FaultPoints
) -> None:
    key = vault.issue()
    fault_point("vault.before_send", "hold")
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(vault.create, key, "c1")
        fault_point.wait_reached("vault.before_send")
        paused = threading.Event()
        paused.wait(10.5)
        fault_point.release("vault.before_send")
        reply = late.result()
    assert (reply.status, reply.code, reply.forwarded) == (503, "busy", "no")
    assert stripe.requests() == []
    assert books.hold("c1")["state"] == "released"
    assert books.hold("c1")["first_sent_at"] is None
    assert vault.create(key, "c1").status == 200


def test_the_clients_leaving_does_not_stop_what_is_under_way(
    vault: VaultProcess, stripe: Stripe, books: Books
) -> None:
    key = vault.issue()
    stripe.fault("latency", stage="after_claim", seconds=2, idempotency_key="c1")
    impatient = urllib3.PoolManager(retries=False, timeout=0.5)
    patient, vault.http = vault.http, impatient
    with pytest.raises(urllib3.exceptions.HTTPError):
        vault.create(key, "c1")
    vault.http = patient
    assert books.hold("c1")["state"] == "sent"
    wait_until(lambda: books.hold("c1")["state"] == "settled", 10, "the outcome is written")
    assert len(stripe.charges()) == 1


def test_a_vault_told_to_stop_ends_what_is_under_way(
    vault: VaultProcess, stripe: Stripe, books: Books
) -> None:
    key = vault.issue()
    stripe.fault("latency", stage="after_claim", seconds=2, idempotency_key="c1")
    with ThreadPoolExecutor(1) as threads:
        reply = threads.submit(vault.create, key, "c1")
        wait_until(stripe.creates, 10, "Stripe has the request")
        vault.ask_to_stop()
        assert reply.result().json["status"] == "succeeded"
    wait_until(lambda: not vault.is_alive(), 10, "the vault has ended")
    assert books.hold("c1")["state"] == "settled"
    assert "vault_stopped" in vault.log.read_text()


def test_more_than_there_are_places_for_is_told_to_wait(
    vault_starter: VaultStarter, stripe: Stripe
) -> None:
    vault = vault_starter(VAULT_CONCURRENCY="2")
    key = vault.issue()
    stripe.fault("latency", stage="after_claim", seconds=2, times=2)
    with ThreadPoolExecutor(2) as threads:
        slow = [threads.submit(vault.create, key, f"c{n}") for n in range(2)]
        wait_until(lambda: len(stripe.creates()) == 2, 10, "both places are taken")
        refused = vault.create(key, "c3")
        assert (refused.status, refused.code, refused.forwarded) == (503, "busy", "no")
        assert refused.headers["Retry-After"] == "1"
        assert refused.headers["Stripe-Should-Retry"] == "false"
        assert vault.request("GET", "/healthz").status == 200
        assert [reply.result().status for reply in slow] == [200, 200]
    assert vault.create(key, "c3").status == 200


def test_without_its_database_the_vault_sends_nothing(
    vault: VaultProcess, stripe: Stripe, services: Services
) -> None:
    key = vault.issue()
    services.kill("postgres")
    refused = vault.create(key, "c1")
    assert (refused.status, refused.code, refused.forwarded) == (503, "busy", "no")
    assert vault.request("GET", "/readyz").status == 503
    assert stripe.creates() == []
    services.heal()
    assert vault.create(key, "c1").status == 200


def test_an_outcome_is_committed_before_the_client_hears_it(
    vault: VaultProcess,
    stripe: Stripe,
    books: Books,
    services: Services,
    fault_point: FaultPoints,
) -> None:
    key = vault.issue()
    fault_point("vault.after_answer", "hold")
    with ThreadPoolExecutor(1) as threads:
        reply = threads.submit(vault.create, key, "c1")
        fault_point.wait_reached("vault.after_answer")
        services.kill("postgres")
        fault_point.release("vault.after_answer")
        assert not reply.done()
        services.heal()
        assert reply.result().json["status"] == "succeeded"
    assert books.hold("c1")["state"] == "settled"
    assert books.budget(RUN)["held_cents"] == 0
