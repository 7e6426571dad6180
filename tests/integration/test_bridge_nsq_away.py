"""An nsqd that is away, hangs half way, or moves: how a bridge of ours finds it again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from bridges.nsq import RECONNECT_S
from models.settings import load_settings
from sandbox.ports import free_port
from tests.support.bridges import RunningBridge
from tests.support.services import Services
from tests.support.waiting import stays

Start = Callable[..., RunningBridge]


@pytest.fixture
def environment(
    services: Services, database_url: str, celery_broker_url: str, nsq_topic: str
) -> dict[str, str]:
    return {
        **services.stack.settings,
        "DATABASE_URL": database_url,
        "CELERY_BROKER_URL": celery_broker_url,
        "NSQ_TOPIC": nsq_topic,
        "NSQ_LOOKUPD_HTTP_ADDRESS": "",
        "LIMITS_CHECK": "warn",
    }


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:

        def start_one(environment: dict[str, str], **changes: str) -> RunningBridge:
            settings = load_settings({**environment, **changes})
            return stack.enter_context(RunningBridge(settings, "nsq"))

        yield start_one


def test_an_nsqd_that_stays_away_is_asked_at_a_steady_pace(
    environment: dict[str, str], start: Start
) -> None:
    """Guard: pynsq's own reconnect, 15 s after each close, must not add to the bridge's."""
    begun = time.monotonic()
    bridge = start(environment, NSQD_TCP_ADDRESS=f"127.0.0.1:{free_port()}")

    def at_most() -> float:
        return 2 + (time.monotonic() - begun) / (0.5 * RECONNECT_S)

    stays(lambda: bridge.count("connect_failed") <= at_most(), 28.0, "one try after another")
    assert bridge.count("connect_failed") >= 28 / (2 * RECONNECT_S), "it is not given up either"
