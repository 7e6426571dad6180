"""The sweep: what is due is published once, by key only."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from kombu.exceptions import OperationalError
from sqlalchemy.engine import Engine

from models.keys import charge_key
from models.ledger import Ledger
from models.ledger_reads import LedgerReads
from models.states import State
from sandbox import clock
from tasks import alarms
from tasks.sweep import BATCH, MAX_PUBLISHED, Sweep
from tests.support.ledgers import event, new_record
from tests.support.roles import RoleStarter
from tests.support.stripe import Stripe
from tests.support.waiting import wait_until

REDISPATCH_S = 6
"""The fast limit of `redispatch_after_s`."""


def reserve(ledger: Ledger, count: int, retry_s: float = 0.0) -> list[str]:
    keys = []
    for number in range(count):
        new = new_record(event(customer_id=f"cust_{number}"))
        assert ledger.reserve(new, "test", retry_s)
        keys.append(new.charge_key)
    return sorted(keys)


@pytest.fixture
def sweep(ledger: Ledger, engine: Engine, database_url: str) -> Callable[..., Sweep]:
    clock.install(database_url)

    def build(publish: Callable[[str], None]) -> Sweep:
        return Sweep(ledger, LedgerReads(engine), publish)

    return build


def test_all_that_is_due_is_published_in_key_order_over_several_batches(
    ledger: Ledger, sweep: Callable[..., Sweep]
) -> None:
    keys = reserve(ledger, 2 * BATCH + 5)
    published: list[str] = []
    assert sweep(published.append).run() == len(keys)
    assert published == keys


def test_what_was_published_waits_before_it_is_published_again(
    ledger: Ledger, sweep: Callable[..., Sweep], database_url: str
) -> None:
    keys = reserve(ledger, 3)
    published: list[str] = []
    sweep(published.append).run()
    assert sweep(published.append).run() == 0
    clock.advance(database_url, REDISPATCH_S + 1)
    sweep(published.append).run()
    assert published == keys * 2


def test_what_is_not_due_or_settled_is_left_alone(
    ledger: Ledger, sweep: Callable[..., Sweep], database_url: str
) -> None:
    (key,) = reserve(ledger, 1, retry_s=60)
    published: list[str] = []
    assert sweep(published.append).run() == 0
    clock.advance(database_url, 61)
    assert sweep(published.append).run() == 1
    assert published == [key]


def test_more_due_records_than_a_run_publishes_keep_none_of_them_from_their_turn(
    ledger: Ledger,
    sweep: Callable[..., Sweep],
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tasks.sweep.MAX_PUBLISHED", BATCH)
    keys = reserve(ledger, BATCH + 5)
    published: list[str] = []
    sweep(published.append).run()
    clock.advance(database_url, REDISPATCH_S + 1)
    # None of them has settled: those in front are due again.
    sweep(published.append).run(start_key=keys[-6])
    assert set(published) == set(keys)


def test_a_run_from_a_later_key_comes_around_to_the_first_ones(
    ledger: Ledger, sweep: Callable[..., Sweep]
) -> None:
    keys = reserve(ledger, BATCH + 5)
    published: list[str] = []
    assert sweep(published.append).run(start_key=keys[2]) == len(keys)
    assert published == keys[3:] + keys[:3]


def test_nothing_is_published_while_the_workers_are_far_behind(
    ledger: Ledger, engine: Engine
) -> None:
    keys = reserve(ledger, 3)
    depth = 10 + MAX_PUBLISHED
    published: list[str] = []
    reads = LedgerReads(engine)
    work = Sweep(ledger, reads, published.append, waiting=lambda: depth, max_depth=10)
    assert (work.run(), published) == (0, [])
    depth -= 1
    work.run()
    assert published == keys, "none was marked as dispatched meanwhile"


def test_a_broker_that_fails_ends_the_run_and_the_next_one_goes_on(
    ledger: Ledger, sweep: Callable[..., Sweep], database_url: str
) -> None:
    keys = reserve(ledger, BATCH + 10)
    published: list[str] = []

    def failing(key: str) -> None:
        if len(published) == 3:
            raise OperationalError("down")
        published.append(key)

    with pytest.raises(OperationalError):
        sweep(failing).run()
    clock.advance(database_url, REDISPATCH_S + 1)
    again: list[str] = []
    sweep(again.append).run()
    assert again == keys


def test_a_record_that_never_settles_rings(
    ledger: Ledger,
    sweep: Callable[..., Sweep],
    database_url: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(alarms, "_rung_at_s", {})  # as in a process that starts
    caplog.set_level(logging.INFO)
    reserve(ledger, 1)
    sweep(lambda _: None).run()
    assert "alarm_stuck" not in caplog.text
    clock.advance(database_url, 3600)
    sweep(lambda _: None).run()
    sweep(lambda _: None).run()
    assert caplog.text.count("alarm_stuck") == 1, "not again with every sweep"


def test_a_reserved_record_is_charged_without_any_delivery(
    role: RoleStarter, ledger: Ledger, stripe: Stripe
) -> None:
    (key,) = reserve(ledger, 1)
    role("worker")
    role("worker-control")
    role("beat")
    wait_until(
        lambda: ledger.read_statuses([key])[key].state is State.CHARGED,
        60,
        "the record is charged",
    )
    assert key == charge_key("cust_0", "2026-Q3")
    assert [one["idempotency_key"] for one in stripe.charges()] == [key]
