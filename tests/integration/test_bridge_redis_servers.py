"""A Redis that is more than one server: a Cluster whose slots move, Sentinels that fail over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from models.events import event_from_json
from models.keys import charge_key
from models.ledger import Ledger, Retry
from models.settings import load_settings
from sandbox import health
from tests.support.bridges import RunningBridge, published_keys, wait_published
from tests.support.ledgers import claimed, new_record, outcome
from tests.support.pipelines import SLACK_S
from tests.support.producers import billing_event, body_of
from tests.support.proxy import Proxy
from tests.support.redis_servers import (
    Cluster,
    Server,
    Watched,
    lone_nodes,
    redis_cluster,
    watched_redis,
)
from tests.support.services import Services
from tests.support.waiting import wait_until

__all__ = ["lone_nodes", "redis_cluster", "watched_redis"]

STREAM = "billing-stream"
GROUP = "billing-group"
SENTINEL_DEMOTES_S = 90
"""Sentinel lets a master that returned be one for 8 s and more before it demotes it."""
Start = Callable[..., RunningBridge]


@pytest.fixture
def environment(services: Services, database_url: str, celery_broker_url: str) -> dict[str, str]:
    return {
        **services.stack.settings,
        "DATABASE_URL": database_url,
        "CELERY_BROKER_URL": celery_broker_url,
        "TOUCH_S": "0.4",
        "MIN_IDLE_S": "1.5",
        # Nothing is published again by itself.
        "REDISPATCH_AFTER_S": "600",
        "BACKOFF_BASE_S": "0.2",
        "BACKOFF_CAP_S": "0.5",
        "LIMITS_CHECK": "warn",
    }


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Start]:
    with ExitStack() as stack:

        def start_one(url: str, **changes: str) -> RunningBridge:
            told = load_settings({**environment, "REDIS_URL": url, **changes})
            return stack.enter_context(RunningBridge(told, "redis"))

        yield start_one


def publish(server: Server, event: dict[str, Any]) -> None:
    with server.client() as client:
        client.xadd(STREAM, {b"payload": body_of(event)})


def pending(server: Server) -> int:
    with server.client() as client:
        return int(client.xpending(STREAM, GROUP)["pending"])


def settle(ledger: Ledger, event: dict[str, Any]) -> None:
    claim = claimed(ledger, new_record(event_from_json(event)))
    ledger.record_outcome(claim, outcome(), Retry(1))


def key_of(event: dict[str, Any]) -> str:
    return charge_key(event["customer_id"], event["billing_period"])


def test_r6_a_slot_that_moves_while_deliveries_are_held_costs_no_ack(
    redis_cluster: Cluster, start: Start, ledger: Ledger
) -> None:
    bridge = start(redis_cluster.url)
    events = [billing_event(f"r6_{n}") for n in range(6)]
    home = redis_cluster.owner(STREAM)
    for event in events[:4]:
        publish(home, event)
    wait_published(bridge.settings, 4)
    old, new = redis_cluster.begin_move(STREAM)
    settle(ledger, events[0])
    settle(ledger, events[1])
    bridge.wait_count("acked", 2)  # the old node says ASK to each command
    redis_cluster.end_move(STREAM, new)
    settle(ledger, events[2])
    settle(ledger, events[3])
    bridge.wait_count("acked", 4)  # and now MOVED
    assert pending(new) == 0
    for event in events[4:]:
        settle(ledger, event)
        publish(new, event)
    bridge.wait_count("acked", 6)
    assert sorted(published_keys(bridge.settings)) == sorted(key_of(e) for e in events[:4])
    assert old is not new


def test_a_killed_node_of_the_cluster_is_waited_for(
    redis_cluster: Cluster, start: Start, ledger: Ledger
) -> None:
    bridge = start(redis_cluster.url)
    home = redis_cluster.owner(STREAM)
    held = billing_event("held")
    publish(home, held)
    wait_published(bridge.settings, 1)
    home.kill()
    bridge.wait_count("read_failed", 2)
    home.start_again()
    wait_until(redis_cluster.is_whole, SLACK_S, "the Cluster is whole again")
    later = billing_event("later")
    publish(home, later)
    for event in (held, later):
        settle(ledger, event)
    wait_until(lambda: bridge.count("acked") >= 2 and pending(home) == 0, SLACK_S, "all acked")


def test_a_node_without_the_stream_that_is_replaced_stops_nothing(
    redis_cluster: Cluster, start: Start
) -> None:
    """Guard: the library asks the first node, dead or not, where the keys of every read are."""
    bridge = start(redis_cluster.url)
    home = redis_cluster.owner(STREAM)
    first = redis_cluster.nodes[0]
    assert first is not home
    publish(home, billing_event("before"))
    bridge.wait_count("taken", 1)
    first.kill()
    redis_cluster.replace(first, home)
    publish(home, billing_event("under_way"))  # may come by a read that had begun
    bridge.wait_count("taken", 2)
    publish(home, billing_event("after"))
    bridge.wait_count("taken", 3)


def test_a_cluster_whose_nodes_all_come_back_elsewhere_is_found_by_its_url(
    lone_nodes: tuple[Server, Server], start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    before, after = lone_nodes
    with Proxy("127.0.0.1", before.port) as named:
        bridge = start(f"redis+cluster://127.0.0.1:{named.port}")
        publish(before, billing_event("before"))
        wait_published(bridge.settings, 1)
        named.target = ("127.0.0.1", after.port)
        before.kill()
        bridge.wait_count("read_failed", 1)
        publish(after, billing_event("after"))
        bridge.wait_count("taken", 2)
    assert "Unclosed" not in caplog.text


def test_a_fail_over_by_the_sentinels_is_followed(
    watched_redis: Watched, start: Start, ledger: Ledger
) -> None:
    bridge = start(watched_redis.url)
    held = billing_event("held")
    publish(watched_redis.first, held)
    wait_published(bridge.settings, 1)
    watched_redis.wait_replicated()
    watched_redis.first.kill()
    watched_redis.fail_over()
    later = billing_event("later")
    publish(watched_redis.second, later)
    for event in (held, later):
        settle(ledger, event)
    wait_until(lambda: pending(watched_redis.second) == 0, SLACK_S, "nothing is pending")
    bridge.wait_count("acked", 2)
    bridge.stop()


def test_a_master_that_was_demoted_while_it_was_frozen_is_left(
    watched_redis: Watched, start: Start, ledger: Ledger
) -> None:
    bridge = start(watched_redis.url)
    first = {"REDIS_URL": f"redis://127.0.0.1:{watched_redis.first.port}/0"}
    wait_until(lambda: not health.bridge_redis(first), SLACK_S, "the bridge reads the first one")
    watched_redis.first.freeze()
    watched_redis.fail_over()
    watched_redis.first.thaw()
    event = billing_event("after")
    settle(ledger, event)
    publish(watched_redis.second, event)
    bridge.wait_count("acked", 1, SENTINEL_DEMOTES_S)
    # An ack that still went to the old master is repeated when the entry comes round.
    wait_until(lambda: pending(watched_redis.second) == 0, SENTINEL_DEMOTES_S, "acked there")
