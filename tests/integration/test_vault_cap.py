"""The cap and the places of a vault, with many charges tried at once."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from sqlalchemy import text
from sqlalchemy.engine import Engine

from tests.support.stripe import Stripe
from tests.support.vault import PATIENT, Books, VaultProcess, VaultStarter
from tests.support.vault_calls import creating_held

CLIENTS = 64
TRIES = 400
FITS = 100
AMOUNT = 2500
CAP = FITS * AMOUNT + AMOUNT - 1

VAULT_ENV = PATIENT

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
    vaults = [vault_starter(**PATIENT), vault_starter(**PATIENT)]
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
    vaults = [vault_starter(**PATIENT), vault_starter(**PATIENT)]
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


def test_more_than_there_are_places_for_is_told_to_wait(
    vault_starter: VaultStarter, stripe: Stripe
) -> None:
    vault = vault_starter(VAULT_CONCURRENCY="2")
    key = vault.issue()
    with creating_held(vault, stripe, key, "c1", "c2") as slow:
        refused = vault.create(key, "c3")
        assert (refused.status, refused.code, refused.forwarded) == (503, "busy", "no")
        assert refused.headers["Retry-After"] == "1"
        assert refused.headers["Stripe-Should-Retry"] == "false"
        assert vault.request("GET", "/healthz").status == 200
        stripe.release()
        assert [reply.result().status for reply in slow] == [200, 200]
    assert vault.create(key, "c3").status == 200
