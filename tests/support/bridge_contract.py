"""What the contract tests of the bridges share: any broker, a bridge on it, the ledger's word."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from sqlalchemy.engine import Engine

from models.dead_letters import DeadLetters
from models.events import event_from_json
from models.keys import charge_key
from models.ledger import Ledger, Retry
from models.outcomes import OutcomeKind
from models.settings import Settings, load_settings
from tests.support.bridges import RunningBridge
from tests.support.brokers import Broker, Nsq, Stream, valkey, valkey_url
from tests.support.ledgers import claimed, new_record, outcome
from tests.support.pipelines import SLACK_S
from tests.support.services import Services
from tests.support.waiting import wait_until

__all__ = ["valkey", "valkey_url"]

LEASE_S = 60
"""No lease runs out, and nothing is published again by itself, but where a test wants it."""
FAST = {
    "TOUCH_S": "0.4",
    "MSG_TIMEOUT_S": str(LEASE_S),
    "MIN_IDLE_S": str(LEASE_S),
    "REDISPATCH_AFTER_S": "600",
    "PARK_AFTER_S": "60",
    "PARK_DELAY_S": "1",
    "BACKOFF_BASE_S": "0.2",
    "BACKOFF_CAP_S": "0.5",
    "LIMITS_CHECK": "warn",
}
SHORT = {"MSG_TIMEOUT_S": "1.5", "MIN_IDLE_S": "1.5"}
"""Leases that run out within the test unless they are extended."""


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


def wait_unfinished(broker: Broker, count: int) -> None:
    """Returns when the broker says so: what it was told may be on its way to it for a while."""
    wait_until(lambda: broker.unfinished() == count, SLACK_S, f"{count} have no ack")


def key_of(event: dict[str, Any]) -> str:
    return charge_key(event["customer_id"], event["billing_period"])
