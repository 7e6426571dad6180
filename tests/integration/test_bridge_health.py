"""What a bridge tells a probe, and what it does when the workers cannot follow."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis

from bridges.unsettled_age import PROBES, UnsettledAge
from models.events import event_from_json
from models.ledger import Ledger, Retry
from models.ledger_reads import LedgerReads
from models.settings import Settings, load_settings
from sandbox import clock
from sandbox.health import http
from sandbox.ports import free_port
from tests.support import bridges
from tests.support.bridges import (
    SOON_S,
    RunningBridge,
    published,
    published_keys,
    wait_published,
)
from tests.support.brokers import Broker, Nsq, Stream
from tests.support.ledgers import claimed, new_record, outcome
from tests.support.producers import billing_event
from tests.support.services import Services
from tests.support.waiting import stays, wait_until

Start = Callable[..., RunningBridge]


@pytest.fixture(params=["nsq", "redis"])
def broker(
    request: pytest.FixtureRequest, services: Services, database_url: str, celery_broker_url: str
) -> Broker:
    environment = {
        **services.stack.settings,
        "DATABASE_URL": database_url,
        "CELERY_BROKER_URL": celery_broker_url,
        "BRIDGE_HEALTH_LISTEN": f"127.0.0.1:{free_port()}",
        "LIMITS_CHECK": "warn",
        "BACKOFF_BASE_S": "0.2",
        "BACKOFF_CAP_S": "0.5",
        "TOUCH_S": "0.3",
        "REDISPATCH_AFTER_S": "60",
    }
    if request.param == "nsq":
        environment["NSQ_TOPIC"] = request.getfixturevalue("nsq_topic")
        return Nsq(environment)
    environment["REDIS_URL"] = request.getfixturevalue("redis_url")
    return Stream(environment)


@pytest.fixture
def settings(broker: Broker) -> Settings:
    return load_settings(broker.environment)


@pytest.fixture
def start(broker: Broker) -> Iterator[Start]:
    with ExitStack() as stack:

        def start_one(**changes: str) -> RunningBridge:
            told = load_settings({**broker.environment, **changes})
            return stack.enter_context(RunningBridge(told, broker.kind))

        yield start_one


def page(broker: Broker, path: str) -> tuple[int, bytes]:
    address = broker.environment["BRIDGE_HEALTH_LISTEN"]
    reply = http.request("GET", f"http://{address}{path}")
    return reply.status, reply.data


def state(broker: Broker, path: str) -> tuple[int, list[str]]:
    status, body = page(broker, path)
    return status, json.loads(body)["problems"]


def is_ready(broker: Broker) -> bool:
    return state(broker, "/readyz") == (200, [])


def metric(broker: Broker, name: str, **labels: str) -> float:
    return bridges.metric(broker.environment["BRIDGE_HEALTH_LISTEN"], name, **labels)


def is_full(broker: Broker) -> bool:
    return metric(broker, "queue_full", source=broker.kind) == 1


def settle(ledger: Ledger, event: dict[str, Any]) -> None:
    claim = claimed(ledger, new_record(event_from_json(event)))
    ledger.record_outcome(claim, outcome(), Retry(1))


def test_the_metrics_page_shows_what_was_done_with_deliveries(
    broker: Broker, start: Start, settings: Settings, ledger: Ledger
) -> None:
    bridge = start()
    events = [billing_event(f"shown_{n}", description="marker-of-a-secret") for n in range(3)]
    for event in events:
        broker.publish(event)
    broker.publish(b"not json")
    wait_published(settings, 3)
    bridge.wait_count("acked", 1)
    bridge.wait_count("renewed", 3)
    bridge.wait_count("published", 3)
    source = broker.kind
    assert metric(broker, "in_flight", source=source) == 3
    for event in events:
        settle(ledger, event)
    bridge.wait_count("acked", 4)
    assert metric(broker, "in_flight", source=source) == 0
    assert metric(broker, "deliveries_total", source=source, disposition="ack") == 4
    assert metric(broker, "dead_letters_total", source=source, reason="invalid_json") == 1
    assert metric(broker, "published_total", source=source) == 3
    assert metric(broker, "renewals_total", source=source) >= 3
    assert metric(broker, "time_to_commit_seconds_count") == 4
    text = page(broker, "/metrics")[1].decode()
    assert "marker-of-a-secret" not in text
    assert "shown_" not in text


def test_a_bridge_without_its_ledger_is_alive_but_not_ready(
    broker: Broker, start: Start, services: Services
) -> None:
    start()
    wait_until(lambda: is_ready(broker), SOON_S, "ready")
    services.kill("postgres")
    broker.publish(billing_event("away"))
    wait_until(lambda: state(broker, "/readyz") == (503, ["ledger"]), SOON_S, "not ready")
    assert state(broker, "/healthz") == (200, [])
    services.heal()
    wait_until(lambda: is_ready(broker), SOON_S, "ready again")


def test_a_bridge_that_moves_nothing_while_there_is_work_is_not_healthy(
    broker: Broker, start: Start, services: Services, settings: Settings
) -> None:
    bridge = start(BRIDGE_STALLED_AFTER_S="1.5")
    stays(lambda: state(broker, "/healthz") == (200, []), 2.0, "no work is no fault")
    services.kill("postgres")
    broker.publish(billing_event("stalled"))
    wait_until(lambda: state(broker, "/healthz") == (503, ["stalled"]), SOON_S, "it says so")
    services.heal()
    wait_published(settings, 1)
    assert bridge.held == 1
    more = (billing_event(f"moves_{number}") for number in itertools.count())

    def healthy() -> bool:
        """Not for long after a move: there is another one at each look."""
        broker.publish(next(more))
        return state(broker, "/healthz") == (200, [])

    wait_until(healthy, SOON_S, "healthy again")


def test_a_full_task_queue_stops_publishing_and_then_intake_but_loses_nothing(
    broker: Broker, start: Start, settings: Settings, ledger: Ledger
) -> None:
    with redis.Redis.from_url(settings.celery_broker_url) as client:
        for number in range(5):
            client.lpush("charges", json.dumps({"number": number}))
        bridge = start(BRIDGE_MAX_QUEUE_DEPTH="5", BRIDGE_MAX_IN_FLIGHT="4")
        events = [billing_event(f"full_{n}") for n in range(8)]
        for event in events:
            broker.publish(event)
        bridge.wait_count("taken", 4)
        wait_until(lambda: is_full(broker), SOON_S, "full")
        stays(lambda: bridge.held == 4 and client.llen("charges") == 5, 2.5, "held, not published")
        assert is_full(broker)
        client.delete("charges")
    wait_published(settings, 4)
    for event in events:
        settle(ledger, event)
    bridge.wait_count("acked", 8)
    wait_until(lambda: broker.unfinished() == 0, SOON_S, "all acked")


def test_a_full_task_queue_that_nobody_takes_from_is_no_reason_to_start_the_bridge_anew(
    broker: Broker, start: Start, settings: Settings
) -> None:
    with redis.Redis.from_url(settings.celery_broker_url) as client:
        client.lpush("charges", *["{}"] * 1000)
        start(BRIDGE_MAX_QUEUE_DEPTH="1", BRIDGE_STALLED_AFTER_S="2.5")
        broker.publish(billing_event("waits"))

        def ready_though_full() -> bool:
            """Workers may be about to take from it. When it is too late to see, they have."""
            if is_full(broker) and is_ready(broker):
                return True
            assert client.rpop("charges"), "never ready, however many were taken"
            return False

        wait_until(ready_though_full, SOON_S, "full, and no problem yet")
        wait_until(
            lambda: state(broker, "/readyz") == (503, ["task_queue_full"]), SOON_S, "it says so"
        )
        stays(lambda: state(broker, "/healthz") == (200, []), 2.0, "another could do no better")
        client.delete("charges")
        wait_published(settings, 1)

        def ready_again() -> bool:
            """Not for long after a move: there is another one at each look."""
            client.delete("charges")
            broker.publish(billing_event("waits"))
            return is_ready(broker)

        wait_until(ready_again, SOON_S, "ready again")


def test_what_is_settled_is_acked_while_the_task_queue_is_full(
    broker: Broker, start: Start, settings: Settings, ledger: Ledger
) -> None:
    with redis.Redis.from_url(settings.celery_broker_url) as client:
        client.lpush("charges", "{}")
    paid = billing_event("paid")
    settle(ledger, paid)
    bridge = start(BRIDGE_MAX_QUEUE_DEPTH="1")
    broker.publish(billing_event("waits"))
    wait_until(lambda: is_full(broker), SOON_S, "full")
    broker.publish(paid)
    bridge.wait_count("acked", 1)
    assert bridge.held == 1


def test_a_sweep_that_does_not_run_rings(
    broker: Broker,
    start: Start,
    ledger: Ledger,
    database_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock.install(database_url)
    ledger.reserve(new_record(event_from_json(billing_event("due"))), "test", 0)
    bridge = start()

    def look() -> bool:
        bridge.await_(lambda bridge: bridge.sweep_watch.run_once())
        return bridge.call(lambda bridge: bridge.sweep_watch.missing)

    assert not look(), "it is not late yet"
    clock.advance(database_url, 1000)
    assert look()
    assert "alarm_no_sweep" in caplog.text
    assert metric(broker, "no_sweep", source=broker.kind) == 1
    ledger.dispatch_due("", 10)
    assert not look()
    clock.advance(database_url, 1000)
    claim = claimed(ledger, new_record(event_from_json(billing_event("another"))))
    ledger.record_outcome(claim, outcome(), Retry(1))
    assert look(), "what is settled says nothing"


@pytest.fixture
def found_behind(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What the looks at whether charging gets on have found; before anything follows from it."""
    found: list[bool] = []
    is_behind = UnsettledAge._is_behind

    def told(self: UnsettledAge) -> bool:
        found.append(is_behind(self))
        return found[-1]

    monkeypatch.setattr(UnsettledAge, "_is_behind", told)
    return found


def test_charging_that_does_not_get_on_stops_publishing_until_it_does(
    broker: Broker, start: Start, settings: Settings, ledger: Ledger, found_behind: list[bool]
) -> None:
    old = [new_record(event_from_json(billing_event(f"old_{n}"))) for n in range(100)]
    claims = [claimed(ledger, record) for record in old[1:]]
    reads = LedgerReads(ledger.engine)
    wait_until(lambda: reads.count_unsettled(0.2, 1000) == 99, SOON_S, "99 that are old")
    assert reads.count_unsettled(0.2, 50) == 50, "counted no further than told"
    bridge = start(BRIDGE_MAX_UNSETTLED_AGE_S="0.2", BRIDGE_STALLED_AFTER_S="1")
    broker.publish(billing_event("first"))
    wait_published(settings, 1)
    wait_until(lambda: found_behind, SOON_S, "it has looked")
    assert not any(found_behind), "99 that are old stop nothing"
    claimed(ledger, old[0])
    behind = (503, ["charging_behind"])
    wait_until(lambda: state(broker, "/readyz") == behind, SOON_S, "it says so")
    for number in range(200):
        broker.publish(billing_event(f"next_{number}"))
    bridge.wait_count("taken", 200)
    wait_published(settings, 1 + PROBES)

    def next_to_nothing() -> bool:
        """What was published is counted before the looks that have allowed it."""
        return len(set(published_keys(settings))) <= 1 + PROBES * sum(found_behind)

    stays(next_to_nothing, 3.0, "next to nothing is published")
    assert metric(broker, "charging_behind", source=broker.kind) == 1
    assert state(broker, "/healthz") == (200, []), "another bridge could do no better"
    # One that settles shows that charging gets on, however many are still old.
    ledger.record_outcome(claims[0], outcome(), Retry(1))
    wait_until(lambda: len(set(published_keys(settings))) >= 200, SOON_S, "all are published")
    wait_until(
        lambda: "charging_behind" not in state(broker, "/readyz")[1], SOON_S, "behind no more"
    )


def test_an_address_in_use_is_refused_in_one_line(broker: Broker, start: Start) -> None:
    start()
    with pytest.raises(Exception, match="BRIDGE_HEALTH_LISTEN: cannot listen there"):
        start()
    assert published(load_settings(broker.environment)) == []
