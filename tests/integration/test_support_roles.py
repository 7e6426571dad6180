"""The product's roles as tests start, kill and freeze them."""

from __future__ import annotations

import signal

from models.keys import charge_key
from models.ledger import Ledger
from tests.support.faults import FaultPoints
from tests.support.flows import PATIENT
from tests.support.producers import billing_event, publish_nsq, publish_redis
from tests.support.roles import RoleStarter
from tests.support.stripe import Stripe
from tests.support.waiting import wait_until


def test_roles_charge_an_event_of_either_broker_once(
    role: RoleStarter, environment: dict[str, str], stripe: Stripe, ledger: Ledger
) -> None:
    role("worker", **PATIENT)
    for kind in ("bridge-nsq", "bridge-redis"):
        role(kind)
    publish_nsq(environment, billing_event("both"))
    publish_redis(environment, billing_event("both"))
    publish_redis(environment, billing_event("redis"))
    wait_until(lambda: len(stripe.charges()) == 2, 30.0, "two events are charged")

    def settled() -> bool:
        records = [ledger.read(charge_key(who, "2026-09")).record for who in ("both", "redis")]
        return all(record is not None and record.state == "charged" for record in records)

    wait_until(settled, 30.0, "both records are settled")
    assert len(stripe.creates()) == 2


def test_an_armed_fault_point_kills_a_worker_where_it_stands(
    role: RoleStarter,
    environment: dict[str, str],
    stripe: Stripe,
    ledger: Ledger,
    fault_point: FaultPoints,
) -> None:
    worker = role("worker", pool="threads", concurrency=1, **PATIENT)
    role("bridge-redis")
    fault_point("worker.after_call", "kill")
    publish_redis(environment, billing_event("one"))
    assert worker.wait_exit() == -signal.SIGKILL
    assert fault_point.reached("worker.after_call")
    assert len(stripe.charges()) == 1
    record = ledger.read(charge_key("one", "2026-09")).record
    assert record is not None
    assert record.state == "sent"


def test_a_bridge_ends_orderly_on_sigterm_and_a_frozen_one_only_after_thawing(
    role: RoleStarter,
) -> None:
    bridge = role("bridge-nsq")
    bridge.freeze()
    bridge.terminate()
    assert bridge.alive
    bridge.thaw()
    assert bridge.wait_exit() == 0
    assert "bridge_stopped" in bridge.log()


def test_beat_control_worker_and_flower_start_as_well(role: RoleStarter) -> None:
    started = [role(kind) for kind in ("worker-control", "beat", "flower")]
    assert all(process.alive for process in started)
    assert len({process.pid for process in started}) == 3
