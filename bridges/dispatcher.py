"""Hands billing events to the workers: publishes tasks.charge by its name, off the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from bridges.backoff import Backoff
from models.errors import ConfigurationError
from models.events import decode_event
from models.faults import fault_point

if TYPE_CHECKING:
    from celery import Celery

    from bridges.counters import Counters
    from models.limits import Limits

logger = logging.getLogger(__name__)

TASK: Final = "tasks.charge"
QUEUE: Final = "charges"
CONNECT_TIMEOUT_S: Final = 3
"""At the start only; publishing has the limits of celeryconfig."""
DEPTH_EVERY_S: Final = 1.0
"""How old the known length of the queue may be: several bridges fill it together."""
BEHIND_PAUSE_S: Final = 1.0
"""Between two looks at whether charging gets on again."""
BATCH: Final = 50
"""Publications that one visit to the publishing thread makes at most."""


@dataclass(frozen=True, slots=True)
class Publication:
    """One event that a worker is to have. `body` was decoded before, so it can be again."""

    charge_key: str
    body: bytes
    source: str


class Publisher:
    """The Celery side, used in one thread: a bare app with the project's configuration."""

    def __init__(self, app: Celery, max_amount_cents: int) -> None:
        self._app = app
        self._max_amount_cents = max_amount_cents
        connection = app.connection_for_write()
        self.errors: tuple[type[Exception], ...] = (
            OSError,
            *_operational_errors(),
            *connection.connection_errors,
            *connection.channel_errors,
        )

    def connect(self) -> None:
        """Raise one of `errors` unless the Celery broker takes a connection."""
        with self._app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, timeout=CONNECT_TIMEOUT_S)

    def depth(self) -> int:
        """Charges that wait on their queue, not yet with a worker. Raises one of `errors`."""
        with self._app.connection_or_acquire(None) as connection:
            channel = connection.default_channel
            try:
                return int(channel.queue_declare(QUEUE, passive=True).message_count)
            except connection.channel_errors:
                return 0  # a queue with nothing on it does not exist

    def publish(self, publication: Publication, *, again: bool) -> None:
        """Put the task on its queue. Raises one of `errors`: it may be there all the same."""
        key = publication.charge_key
        event = decode_event(publication.body, max_amount_cents=self._max_amount_cents)
        fault_point("bridge.before_publish")
        self._app.send_task(
            TASK,
            args=[key],
            kwargs={"event": event.to_json(), "source": publication.source},
            task_id=str(uuid4()) if again else key,
            queue=QUEUE,
            ignore_result=True,
            # What events, logs and Flower show of the arguments: never the event itself.
            argsrepr=repr((key,)),
            kwargsrepr=repr({"source": publication.source}),
        )
        fault_point("bridge.after_publish")


def make_publisher(max_amount_cents: int) -> Publisher:
    """A publisher with the project's Celery configuration and none of its tasks.

    Raises ConfigurationError for a broker that Celery does not know.
    """
    from celery import Celery  # noqa: PLC0415 - heavy, and not needed to show help

    app = Celery("chargebridge-bridge", set_as_current=False)
    app.config_from_object("celeryconfig", force=True)
    try:
        return Publisher(app, max_amount_cents)
    except (KeyError, ValueError, ImportError):
        # Not repeated here: it may hold a password.
        raise ConfigurationError("CELERY_BROKER_URL: Celery cannot use this URL") from None


def _operational_errors() -> tuple[type[Exception], ...]:
    from kombu.exceptions import KombuError, OperationalError  # noqa: PLC0415 - heavy

    return (OperationalError, KombuError)


@dataclass(frozen=True, slots=True)
class _Visit:
    """What one visit to the publishing thread came to."""

    published: Sequence[Publication]
    failure: str | None
    depth: int | None = None
    """Length of the queue before it, if it was asked for."""


class Dispatcher:
    """Events that wait for their worker. One publication a key at a time, whoever asks.

    A failed publish is ambiguous: the task may run all the same, which the ledger makes
    harmless. Nothing is acked for it, and it is tried again with back-off.
    """

    def __init__(
        self,
        publisher: Publisher,
        executor: Executor,
        limits: Limits,
        counters: Counters,
        *,
        max_depth: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_depth`: charges on the queue beyond which nothing is published; 0: any number."""
        self.paused = False
        """Whether nothing is published now because the queue is full."""
        self.probes: int | None = None
        """Set from outside when charging does not get on: so many may be published all the same."""
        self._max_depth = max_depth
        self._depth = 0
        self._next_depth = 0.0
        self._publisher = publisher
        self._executor = executor
        self._limits = limits
        self._counters = counters
        self._clock = clock
        self._backoff = Backoff(limits, clock)
        self._waiting: dict[str, Publication] = {}
        self._published_at: dict[str, float] = {}
        self._wake = asyncio.Event()

    @property
    def behind(self) -> bool:
        """Whether next to nothing is published now because charging does not get on."""
        return self.probes is not None

    @property
    def failing(self) -> bool:
        """Whether the last try to publish failed."""
        return self._backoff.failing

    def want(self, publication: Publication) -> None:
        """Have this event published; asking twice changes nothing."""
        self._waiting.setdefault(publication.charge_key, publication)
        self._wake.set()

    def published_ago_s(self, charge_key: str) -> float | None:
        """Seconds since a worker was last given this key; None: never, as far as is known."""
        at = self._published_at.get(charge_key)
        return None if at is None else self._clock() - at

    def forget(self, charge_key: str) -> None:
        """The ledger has this key: no publication is wanted or remembered any more."""
        self._waiting.pop(charge_key, None)
        self._published_at.pop(charge_key, None)

    def prune(self, held_keys: set[str]) -> None:
        """Drop what nobody holds any more, once it no longer stops a repeated publication."""
        oldest = self._clock() - self._limits.redispatch_after_s
        for key in [k for k in self._waiting if k not in held_keys]:
            del self._waiting[key]
        stale = [k for k, at in self._published_at.items() if at < oldest and k not in held_keys]
        for key in stale:
            del self._published_at[key]

    async def run(self) -> None:
        """Publish whatever comes, until cancelled."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(self._pause_s())
            await self.run_once()
            if not self._waiting:
                self._wake.clear()

    def _pause_s(self) -> float:
        full_s = self._next_depth - self._clock() if self.paused else 0.0
        behind_s = BEHIND_PAUSE_S if self.behind else 0.0
        return max(0.0, full_s, behind_s, self._backoff.wait_s)

    async def run_once(self) -> None:
        """Publish up to one batch of what waits.

        Not if the last try failed just now, not while the queue is full, and only a few while
        charging does not get on: then the deliveries stay held, the slots fill, and the broker
        keeps what is new.
        """
        most = BATCH if self.probes is None else min(BATCH, self.probes)
        batch = list(islice(self._waiting.values(), most))
        if not batch or not self._backoff.ready:
            return
        again = {p.charge_key for p in batch if p.charge_key in self._published_at}
        ask = bool(self._max_depth) and self._clock() >= self._next_depth
        if self.paused and not ask:
            return
        visit = await asyncio.get_running_loop().run_in_executor(
            self._executor, self._visit, batch, again, ask
        )
        self._note_depth(visit)
        now = self._clock()
        for publication in visit.published:
            if self._waiting.pop(publication.charge_key, None) is not None:
                self._published_at[publication.charge_key] = now
        self._counters.add("published", len(visit.published))
        if self.probes is not None:
            self.probes = max(0, self.probes - len(visit.published))
        if visit.failure is None:
            self._backoff.worked()
            return
        self._counters.add("publish_failed")
        extra = {"error": visit.failure, "retry_s": round(self._backoff.failed(), 1)}
        logger.warning("publish_failed", extra=extra)

    def _note_depth(self, visit: _Visit) -> None:
        if visit.depth is None:
            return
        self._next_depth = self._clock() + DEPTH_EVERY_S
        # Workers that take from a full queue are progress, though nothing is published.
        self._counters.add("queue_moved", int(self.paused and visit.depth < self._depth))
        self._depth = visit.depth
        full = visit.depth >= self._max_depth
        if full != self.paused:
            self.paused = full
            event = "task_queue_full" if full else "task_queue_has_room"
            logger.warning(event, extra={"depth": visit.depth, "limit": self._max_depth})

    def _visit(self, batch: Sequence[Publication], again: set[str], ask: bool) -> _Visit:
        depth: int | None = None
        if ask:
            try:
                depth = self._publisher.depth()
            except self._publisher.errors as error:
                return _Visit([], _root(error))
            if depth >= self._max_depth:
                return _Visit([], None, depth)
        return self._publish(batch, again, depth)

    def _publish(self, batch: Sequence[Publication], again: set[str], depth: int | None) -> _Visit:
        published: list[Publication] = []
        for publication in batch:
            try:
                self._publisher.publish(publication, again=publication.charge_key in again)
            except self._publisher.errors as error:
                # The type only: a broker's message may carry its address and password.
                return _Visit(published, _root(error), depth)
            published.append(publication)
        return _Visit(published, None, depth)


def _root(error: BaseException) -> str:
    cause: Any = error.__cause__ or error
    return type(cause).__name__
