"""The simulator without HTTP, held and let go by the test, and what it keeps in its file."""

from __future__ import annotations

import re
import time
from pathlib import Path
from urllib.parse import urlencode

import pytest

from sandbox.stripe_simulator.core import Simulator as InProcess
from sandbox.stripe_simulator.messages import Pause, Request
from tests.contract.stripe_simulator.simulator import INTENTS, KEY, payment


def create(key: str, form: dict[str, object] | None = None) -> Request:
    return Request(
        "POST",
        INTENTS,
        headers={"authorization": f"Bearer {KEY}", "idempotency-key": key},
        body=urlencode(form or payment()).encode(),
    )


def test_in_process_an_exchange_can_be_held_at_a_stage_and_let_go() -> None:
    simulator = InProcess()
    fault = b'{"match": {}, "stage": "after_claim", "kind": "latency", "seconds": 7}'
    simulator.handle(Request("POST", "/_sim/faults", body=fault))

    held = simulator.exchange(create("k1"))
    assert next(held) == Pause(7)
    assert simulator.handle(create("k1")).status == 409
    with pytest.raises(StopIteration) as done:
        next(held)

    assert done.value.value.status == 200
    assert simulator.handle(create("k1")).replayed


def test_in_process_an_exchange_given_up_is_like_a_dead_server() -> None:
    simulator = InProcess()
    fault = b'{"match": {}, "stage": "after_claim", "kind": "latency", "seconds": 7}'
    simulator.handle(Request("POST", "/_sim/faults", body=fault))
    held = simulator.exchange(create("k1"))
    next(held)
    held.close()

    assert simulator.handle(Request("GET", "/_sim/charges")).json()["data"] == []
    retry = simulator.handle(create("k1"))
    assert (retry.status, retry.replayed) == (200, False)
    listing = Request("GET", INTENTS, headers={"authorization": f"Bearer {KEY}"})
    assert len(simulator.handle(listing).json()["data"]) == 1


def test_what_was_committed_before_a_wait_is_in_the_file(tmp_path: Path) -> None:
    simulator = InProcess(tmp_path / "state")
    fault = b'{"match": {}, "stage": "after_commit", "kind": "latency", "seconds": 7}'
    simulator.handle(Request("POST", "/_sim/faults", body=fault))
    held = simulator.exchange(create("k1"))
    next(held)

    successor = InProcess(tmp_path / "state")

    assert len(successor.handle(Request("GET", "/_sim/charges")).json()["data"]) == 1
    assert successor.handle(create("k1")).replayed
    successor.close()
    held.close()
    simulator.close()


def test_in_process_the_clock_is_the_callers(tmp_path: Path) -> None:
    now = [1_800_000_000.0]
    simulator = InProcess(tmp_path / "state", clock=lambda: now[0])
    assert simulator.handle(create("k1")).json()["created"] == 1_800_000_000
    now[0] += 24 * 3600 - 1
    assert simulator.handle(create("k1")).replayed
    now[0] += 1

    assert not simulator.handle(create("k1")).replayed
    simulator.close()


def test_old_keys_are_swept_out_of_the_state(tmp_path: Path) -> None:
    """The store does not grow with keys that can never be asked for again."""
    now = [1_800_000_000.0]
    simulator = InProcess(tmp_path / "state", clock=lambda: now[0])
    simulator.handle(create("old"))
    now[0] += 25 * 3600
    for number in range(2000):
        simulator.handle(create(f"k{number}", payment("cus_missing")))

    assert simulator._store.answer("old") is None
    assert simulator._store.answer("k1999") is not None
    simulator.close()


def test_it_keeps_up_with_a_busy_stack() -> None:
    """Well under what it does, but far over what a loop with a table scan in it would do."""
    simulator = InProcess()
    started = time.process_time()
    for number in range(1000):
        assert simulator.handle(create(f"k{number}", payment(f"cus_{number}"))).status == 200

    assert 1000 / (time.process_time() - started) > 300


def test_the_file_names_no_secret_key(tmp_path: Path) -> None:
    simulator = InProcess(tmp_path / "state")
    simulator.handle(create("k1"))
    simulator.close()

    assert not re.search(KEY.encode(), (tmp_path / "state").read_bytes())
