"""A bridge in a thread of the test, with its own loop, against real services."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, TypeVar

import pytest
import redis
from celery import Celery

from bridges.bridge import Bridge
from bridges.dispatcher import Publisher
from bridges.health import listen, serving
from bridges.start import LEDGER_THREADS, assemble, check_ledger, source_maker
from bridges.threads import DaemonThreads
from models.database import make_engine
from models.settings import Settings, load_settings
from sandbox.health import http
from tests.support.waiting import wait_until

T = TypeVar("T")
SOON_S = 30.0
"""Bound of what is to come at all, whenever that is: the machine may be busy."""


class RunningBridge:
    """`with RunningBridge(settings, "nsq") as bridge: …`; the end is an orderly shutdown."""

    def __init__(self, settings: Settings, kind: str) -> None:
        self.settings = settings
        self.kind = kind
        self.bridge: Bridge | None = None
        self.failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name=f"bridge-{kind}", daemon=True)

    def __enter__(self) -> RunningBridge:
        self._thread.start()
        wait_until(lambda: self.bridge or self.failure, SOON_S, "the bridge is put together")
        self._raise()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # shown by the test that owns the bridge
            self.failure = error

    async def _serve(self) -> None:
        engine = make_engine(self.settings, pool_size=LEDGER_THREADS, name="test-bridge")
        ledger = check_ledger(engine, self.settings, f"bridge-{self.kind}")
        publisher = Publisher(celery_app(self.settings), self.settings.max_amount_cents)
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            with DaemonThreads(LEDGER_THREADS, "l") as one, DaemonThreads(1, "p") as other:
                source = source_maker(self.kind)
                bridge = assemble(self.settings, source, ledger, publisher, (one, other))
                sockets = listen(self.settings.bridge_health_listen)
                with serving(bridge, sockets, self.settings.bridge_stalled_after_s):
                    self.bridge = bridge
                    await bridge.run(self._stop)
        finally:
            engine.dispose()

    def call(self, function: Callable[[Bridge], T]) -> T:
        """Call this with the bridge, on the bridge's own loop."""
        assert self._loop is not None
        assert self.bridge is not None
        answer: Future[T] = Future()
        bridge = self.bridge
        self._loop.call_soon_threadsafe(lambda: answer.set_result(function(bridge)))
        return answer.result(SOON_S)

    def await_(self, work: Callable[[Bridge], Coroutine[Any, Any, T]]) -> T:
        """The same for what has to be awaited there."""
        assert self._loop is not None
        assert self.bridge is not None
        return asyncio.run_coroutine_threadsafe(work(self.bridge), self._loop).result(SOON_S)

    def count(self, name: str) -> int:
        """How often something has happened (see bridges/counters.py)."""
        self._raise()
        assert self.bridge is not None
        return self.bridge.counters[name]

    @property
    def held(self) -> int:
        self._raise()
        assert self.bridge is not None
        return len(self.bridge.held)

    @property
    def parked(self) -> int:
        self._raise()
        assert self.bridge is not None
        return len(self.bridge.parked)

    def wait_count(self, name: str, count: int, timeout_s: float = SOON_S) -> None:
        wait_until(lambda: self.count(name) >= count, timeout_s, f"{count} times {name}")

    def stop(self) -> None:
        """As SIGTERM does; returns when the bridge has ended, and raises what it failed with."""
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(SOON_S)
        assert not self._thread.is_alive(), "the bridge did not end"
        self._raise()

    def _raise(self) -> None:
        if self.failure is not None:
            raise self.failure


Start = Callable[..., RunningBridge]


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(environment, NAME="value")`: a bridge on NSQ, until the test is over."""
    with ExitStack() as stack:

        def start_one(environment: dict[str, str], **changes: str) -> RunningBridge:
            settings = load_settings({**environment, **changes})
            return stack.enter_context(RunningBridge(settings, "nsq"))

        yield start_one


def celery_app(settings: Settings) -> Celery:
    """A bare producer with the time limits that the product's configuration has."""
    app = Celery("test-bridge", broker=settings.celery_broker_url, set_as_current=False)
    app.conf.update(
        broker_connection_timeout=2,
        broker_transport_options={"socket_timeout": 2, "socket_connect_timeout": 2},
        task_publish_retry_policy={
            "max_retries": 0,
            "interval_start": 0,
            "interval_step": 0,
            "interval_max": 0,
        },
        task_ignore_result=True,
    )
    return app


def published(settings: Settings) -> list[dict[str, Any]]:
    """The tasks that wait on the queue `charges`, oldest first: headers and arguments."""
    with redis.Redis.from_url(settings.celery_broker_url) as client:
        messages = [json.loads(raw) for raw in reversed(client.lrange("charges", 0, -1))]
    tasks = []
    for message in messages:
        args, kwargs, _embed = json.loads(base64.b64decode(message["body"]))
        tasks.append({"headers": message["headers"], "args": args, "kwargs": kwargs})
    return tasks


def published_keys(settings: Settings) -> list[str]:
    return [task["args"][0] for task in published(settings)]


def wait_published(settings: Settings, count: int, timeout_s: float = SOON_S) -> None:
    wait_until(lambda: len(published(settings)) >= count, timeout_s, f"{count} publications")


def task_ids(settings: Settings) -> set[str]:
    """The ids of those tasks: of one whose publication had no reply there may be two alike."""
    return {task["headers"]["id"] for task in published(settings)}


class RequeuesInARow:
    """Whether so many requeues came with no message timeout between them or after them.

    One that begins while the bridge does not get the processor may well miss its time.
    """

    def __init__(self, channel: Callable[[], Mapping[str, Any]], count: int) -> None:
        """`channel` gives nsqd's own numbers."""
        self._channel = channel
        self._count = count
        self._before = 0
        self.timeouts = 0
        """How many came before them."""

    def __call__(self) -> bool:
        channel = self._channel()
        if channel["timeout_count"] != self.timeouts:
            self.timeouts, self._before = channel["timeout_count"], channel["requeue_count"]
        return bool(channel["requeue_count"] - self._before >= self._count)


def metric(address: str, name: str, **labels: str) -> float:
    """One line of a bridge's metrics page at BRIDGE_HEALTH_LISTEN; 0 when it is not there."""
    page = http.request("GET", f"http://{address}/metrics").data.decode()
    wanted = {f'{label}="{value}"' for label, value in labels.items()}
    for line in page.splitlines():
        told, _, value = line.rpartition(" ")
        found, _, rest = told.partition("{")
        if found == f"chargebridge_bridge_{name}" and wanted <= set(rest.rstrip("}").split(",")):
            return float(value)
    return 0.0
