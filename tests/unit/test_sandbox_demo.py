"""The demo's plan and its verdict."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from models.events import decode_event
from sandbox.demo import Proof, deliveries

GOOD = Proof(
    published=480,
    distinct=240,
    charged=240,
    duplicate_charges=0,
    missed=0,
    dead_letters=0,
    nsq_unfinished=0,
    redis_pending=0,
    ledger_total_cents=7,
    stripe_total_cents=7,
    cap_cents=8,
    settled_cents=7,
    held_cents=0,
    seconds=1.0,
)


def test_every_event_is_valid_and_published_twice_half_of_them_on_both_brokers() -> None:
    planned = deliveries(240)
    assert len(planned) == 480
    bodies = Counter(delivery.body for delivery in planned)
    assert len(bodies) == 240
    assert set(bodies.values()) == {2}
    on_both = Counter(body for body, _ in {(d.body, d.broker) for d in planned})
    assert Counter(on_both.values()) == {1: 120, 2: 120}
    assert {decode_event(body).billing_period for body in bodies} == {"2026-09"}


def test_an_odd_number_of_events_is_planned_as_well() -> None:
    assert len(deliveries(7)) == 14


def test_a_proof_holds_when_nothing_is_wrong() -> None:
    assert GOOD.holds


@pytest.mark.parametrize(
    "wrong",
    [
        {"duplicate_charges": 1},
        {"missed": 1},
        {"nsq_unfinished": 1},
        {"redis_pending": 1},
        {"stripe_total_cents": 8},
        {"settled_cents": 8},
        {"held_cents": 1},
        {"cap_cents": 6},
    ],
)
def test_a_proof_fails_on_each_single_fault(wrong: dict[str, int]) -> None:
    assert not replace(GOOD, **wrong).holds
