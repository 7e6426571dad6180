"""Is the bridge alive, is it ready, and does anything move: three pages for a probe."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application, RequestHandler

from bridges.metrics import CONTENT_TYPE, BridgeCollector, page
from models.addresses import host_and_port
from models.errors import ConfigurationError

if TYPE_CHECKING:
    import socket

    from bridges.bridge import Bridge

logger = logging.getLogger(__name__)

MOVES: Final = (
    *("acked", "parked", "handed_back", "requeued_before_timeout", "overflow"),
    *("published", "dead_letters", "queue_moved"),
)
"""Counts that only grow when a delivery gets on."""
IDLE_CONNECTION_S: Final = 30
MAX_HEADER_BYTES: Final = 8 * 1024


class Progress:
    """Notices that nothing moves while there is work."""

    def __init__(
        self, bridge: Bridge, limit_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bridge = bridge
        self._limit_s = limit_s
        self._clock = clock
        self._moves = 0
        self._moved_at = clock()

    def stalled(self) -> bool:
        """Whether deliveries have been held for the limit, and not one has got on.

        Not while they are held on purpose, because charging does not get on: a bridge that
        was started anew could do no better.
        """
        moves = sum(self._bridge.counters[name] for name in MOVES)
        oldest = min((held.taken_at for held in self._bridge.held), default=None)
        now = self._clock()
        if moves != self._moves or oldest is None or self._bridge.dispatcher.behind:
            self._moves, self._moved_at = moves, now
            return False
        # Nobody may have asked for long: what came only now has not waited since then.
        return now - max(self._moved_at, oldest) > self._limit_s


def needs_restart(bridge: Bridge, progress: Progress) -> bool:
    """Whether it is stalled for its own part.

    Not because workers take nothing from a full task queue: another could do no better.
    """
    return progress.stalled() and not bridge.dispatcher.paused


def problems(bridge: Bridge, progress: Progress) -> list[str]:
    """What keeps the bridge from working now, in single words; none: it is ready."""
    stalled, full = progress.stalled(), bridge.dispatcher.paused
    found = {
        "stopping": bridge.stopping,
        "source": not bridge.source.ready,
        "ledger": bridge.ledger_away,
        "task_queue": bridge.dispatcher.failing,
        "charging_behind": bridge.dispatcher.behind,
        # A full queue that workers take from is no problem.
        "task_queue_full": stalled and full,
        "stalled": stalled and not full,
    }
    return [name for name, holds in found.items() if holds]


class _Page(RequestHandler):
    def initialize(self, bridge: Bridge, progress: Progress) -> None:
        self.bridge = bridge
        self.progress = progress

    def _answer(self, found: list[str]) -> None:
        self.set_status(503 if found else 200)
        self.finish({"ok": not found, "problems": found})


class _Healthz(_Page):
    def get(self) -> None:
        """Alive, and moving when there is work."""
        self._answer(["stalled"] if needs_restart(self.bridge, self.progress) else [])


class _Readyz(_Page):
    def get(self) -> None:
        """All parts that it needs are there, as far as it has heard."""
        self._answer(problems(self.bridge, self.progress))


class _Metrics(_Page):
    def get(self) -> None:
        self.set_header("Content-Type", CONTENT_TYPE)
        self.finish(page(self.bridge))


def listen(address: str) -> list[socket.socket]:
    """Sockets on `host:port`, none for an empty address; raises ConfigurationError."""
    if not address:
        return []
    host, port = host_and_port("BRIDGE_HEALTH_LISTEN", address)
    try:
        return bind_sockets(port, host)
    except OSError as error:
        kind = type(error).__name__
        raise ConfigurationError(f"BRIDGE_HEALTH_LISTEN: cannot listen there ({kind})") from None


@contextmanager
def serving(bridge: Bridge, sockets: list[socket.socket], limit_s: float) -> Iterator[None]:
    """Answer probes on the running loop, which every answer is quick enough for."""
    parts: dict[str, Any] = {"bridge": bridge, "progress": Progress(bridge, limit_s)}
    bridge.counters.registry.register(BridgeCollector(bridge))
    pages = [("/healthz", _Healthz, parts), ("/readyz", _Readyz, parts)]
    application = Application([*pages, ("/metrics", _Metrics, parts)], log_function=_quiet)
    server = HTTPServer(
        application, idle_connection_timeout=IDLE_CONNECTION_S, max_header_size=MAX_HEADER_BYTES
    )
    server.add_sockets(sockets)
    try:
        yield
    finally:
        server.stop()


def _quiet(_handler: RequestHandler) -> None:
    """A probe every few seconds is nothing to write down."""
