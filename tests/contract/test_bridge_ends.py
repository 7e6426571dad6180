"""The same suite where something ends: the bridge itself, the ledger, the task queue."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from bridges import bridge as bridge_module
from bridges import threads
from models.ledger import Ledger
from models.settings import Settings
from tests.support.bridge_contract import (
    LEASE_S,
    SHORT,
    Start,
    broker,
    key_of,
    settings,
    settle,
    start,
    wait_unfinished,
)
from tests.support.bridges import published, published_keys, wait_published
from tests.support.brokers import Broker, valkey, valkey_url
from tests.support.pipelines import SLACK_S
from tests.support.producers import billing_event
from tests.support.services import Services
from tests.support.waiting import stays, wait_until

__all__ = ["broker", "settings", "start", "valkey", "valkey_url"]


def test_a_stop_hands_back_and_another_bridge_has_it_long_before_the_lease_ends(
    broker: Broker, start: Start, settings: Settings, ledger: Ledger
) -> None:
    first = start(TOUCH_S="5")
    events = [billing_event(f"back_{n}") for n in range(3)]
    for event in events:
        broker.publish(event)
    first.wait_count("taken", 3)
    second = start(TOUCH_S="5")
    first.stop()
    assert first.count("handed_back") == 3
    assert first.count("acked") == 0
    # Long before the lease of the first one would have run out.
    wait_until(lambda: second.held == 3, LEASE_S / 2, "the second bridge has them")
    for event in events:
        settle(ledger, event)
    second.wait_count("acked", 3)
    wait_unfinished(broker, 0)


def test_a_stop_waits_for_commits_that_come_in_time(
    broker: Broker,
    start: Start,
    settings: Settings,
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bridge_module, "SHUTDOWN_GRACE_S", SLACK_S)
    monkeypatch.setattr(threads, "HURRIED_LIMIT_S", SLACK_S)
    event = billing_event("in_time")
    bridge = start()
    broker.publish(event)
    wait_published(settings, 1)
    with ThreadPoolExecutor(1) as aside:
        stopped = aside.submit(bridge.stop)
        wait_until(lambda: bridge.call(lambda core: core.stopping), SLACK_S, "it has been told")
        settle(ledger, event)
        stopped.result()
    assert bridge.count("acked") == 1
    assert bridge.count("handed_back") == 0
    wait_unfinished(broker, 0)


def test_without_a_ledger_nothing_is_acked_or_published_and_all_goes_on_after_it(
    broker: Broker, start: Start, settings: Settings, ledger: Ledger, services: Services
) -> None:
    paid, fresh = billing_event("paid"), billing_event("fresh")
    settle(ledger, paid)
    bridge = start(**SHORT)
    services.kill("postgres")
    for event in (paid, fresh):
        broker.publish(event)
    broker.publish(b"not json")
    bridge.wait_count("taken", 3)
    renewed = bridge.count("renewed")
    # Longer than the lease on a delivery: it is renewed all the same.
    stays(lambda: bridge.held == 3 and not bridge.count("acked"), 3.0, "held")
    bridge.wait_count("renewed", renewed + 3)
    wait_unfinished(broker, 3)
    assert published(settings) == []
    services.heal()
    bridge.wait_count("acked", 2)
    wait_published(settings, 1)
    assert published_keys(settings) == [key_of(fresh)]
    wait_unfinished(broker, 1)


def test_without_a_task_queue_nothing_is_acked_and_the_event_is_published_after_it(
    broker: Broker, start: Start, services: Services, settings: Settings, ledger: Ledger
) -> None:
    if broker.kind == "redis" and "redis" in settings.redis_url:
        services.need("redis")
    bridge = start()
    paid, fresh = billing_event("paid"), billing_event("fresh")
    settle(ledger, paid)
    services.freeze("redis")
    if broker.kind == "nsq":
        broker.publish(paid)
        broker.publish(fresh)
        # What is settled is acked all the same.
        bridge.wait_count("acked", 1)
        bridge.wait_count("publish_failed", 2, SLACK_S)
        wait_unfinished(broker, 1)
    services.thaw("redis")
    if broker.kind == "redis":
        broker.publish(paid)
        broker.publish(fresh)
        bridge.wait_count("acked", 1, SLACK_S)
    wait_published(settings, 1)
    assert key_of(fresh) in published_keys(settings)
    wait_unfinished(broker, 1)
