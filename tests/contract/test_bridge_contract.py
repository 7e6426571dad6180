"""One suite over both brokers: each delivery is answered once, and acked only after a commit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol

import pytest
import redis
from sqlalchemy import text
from sqlalchemy.engine import Engine

from models.dead_letters import DeadLetters
from models.events import event_from_json
from models.keys import charge_key
from models.ledger import Ledger, Retry
from models.outcomes import OutcomeKind
from models.settings import Settings, load_settings
from sandbox.health import get_json
from sandbox.stack import create_channel, create_group
from tests.support.bridges import RunningBridge, published, published_keys, wait_published
from tests.support.ledgers import claimed, new_record, outcome
from tests.support.producers import billing_event, publish_nsq, publish_redis
from tests.support.services import Services
from tests.support.waiting import stays, wait_until

FAST = {
    "TOUCH_S": "0.4",
    "MSG_TIMEOUT_S": "1.5",
    "MIN_IDLE_S": "1.5",
    "PARK_AFTER_S": "60",
    "PARK_DELAY_S": "1",
    "BACKOFF_BASE_S": "0.2",
    "BACKOFF_CAP_S": "0.5",
    "LIMITS_CHECK": "warn",
}


class Broker(Protocol):
    """A broker as a test sees it: give it events, see what is not yet answered."""

    kind: str
    environment: dict[str, str]

    def publish(self, event: dict[str, Any] | bytes) -> None: ...

    def unfinished(self) -> int: ...


class Nsq:
    kind = "nsq"

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        create_channel(environment)

    def publish(self, event: dict[str, Any] | bytes) -> None:
        publish_nsq(self.environment, event)

    def unfinished(self) -> int:
        channel = nsq_channel(self.environment)
        return int(channel["depth"] + channel["in_flight_count"] + channel["deferred_count"])


def nsq_channel(environment: dict[str, str]) -> dict[str, Any]:
    stats = get_json(
        f"http://{environment['NSQD_HTTP_ADDRESS']}/stats?format=json"
        f"&topic={environment['NSQ_TOPIC']}&include_mem=false"
    )
    found: dict[str, Any] = stats["topics"][0]["channels"][0]
    return found


class Stream:
    kind = "redis"

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        create_group(environment)

    def publish(self, event: dict[str, Any] | bytes) -> None:
        publish_redis(self.environment, event)

    def unfinished(self) -> int:
        with redis.Redis.from_url(self.environment["REDIS_URL"]) as client:
            stream, group = self.environment["REDIS_STREAM"], self.environment["REDIS_GROUP"]
            pending = client.xpending(stream, group)["pending"]
            delivered = client.xinfo_groups(stream)[0]["last-delivered-id"]
            return int(pending) + len(client.xrange(stream, min=b"(" + delivered))


@pytest.fixture(params=["nsq", "redis", "valkey"])
def broker(
    request: pytest.FixtureRequest,
    services: Services,
    database_url: str,
    celery_broker_url: str,
) -> Broker:
    environment = {
        **services.stack.settings,
        **FAST,
        "LIMITS": "fast",
        "DATABASE_URL": database_url,
        "CELERY_BROKER_URL": celery_broker_url,
    }
    if request.param == "nsq":
        environment["NSQ_TOPIC"] = request.getfixturevalue("nsq_topic")
        return Nsq(environment)
    name = "redis_url" if request.param == "redis" else "valkey_url"
    environment["REDIS_URL"] = request.getfixturevalue(name)
    return Stream(environment)


Start = Callable[..., RunningBridge]


@pytest.fixture
def start(broker: Broker) -> Iterator[Start]:
    """Starts a bridge on the broker; settings can be given by their names."""
    with ExitStack() as stack:

        def start_one(**changes: str) -> RunningBridge:
            settings = load_settings({**broker.environment, **changes})
            return stack.enter_context(RunningBridge(settings, broker.kind))

        yield start_one


@pytest.fixture
def settings(broker: Broker) -> Settings:
    return load_settings(broker.environment)


def settle(ledger: Ledger, event: dict[str, Any], kind: OutcomeKind = OutcomeKind.CHARGED) -> None:
    claim = claimed(ledger, new_record(event_from_json(event)))
    ledger.record_outcome(claim, outcome(kind), Retry(1))


def dead_letters(engine: Engine) -> list[Any]:
    return list(DeadLetters(engine).list(limit=100))


def key_of(event: dict[str, Any]) -> str:
    return charge_key(event["customer_id"], event["billing_period"])


def test_an_event_is_published_and_acked_only_when_its_record_is_settled(
    broker: Broker, start: Start, settings: Settings, ledger: Ledger
) -> None:
    event = billing_event("a")
    bridge = start()
    broker.publish(event)
    wait_published(settings, 1)
    (task,) = published(settings)
    assert task["args"] == [key_of(event)]
    assert task["kwargs"] == {"event": event_from_json(event).to_json(), "source": broker.kind}
    assert task["headers"]["id"] == key_of(event)
    claim = claimed(ledger, new_record(event_from_json(event)))
    stays(lambda: broker.unfinished() == 1, 1.0, "not acked while the record says sent")
    ledger.record_outcome(claim, outcome(), Retry(1))
    wait_until(lambda: broker.unfinished() == 0, 5, "acked")
    assert bridge.count("acked") == 1
    assert len(published(settings)) == 1
