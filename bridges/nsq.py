"""The NSQ side of a bridge. The only module that imports nsq."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import nsq

from bridges.addresses import addresses, check_nsq_names
from bridges.delivery import Delivery, Intake

if TYPE_CHECKING:
    from bridges.counters import Counters
    from models.settings import Settings

logger = logging.getLogger(__name__)

RECONNECT_S: Final = 1.0
CONNECT_LIMIT_S: Final = 10.0
"""A connection that is not ready by then is closed and made anew: a frozen nsqd accepts one."""
LOOKUPD_POLL_S: Final = 2
OUTPUT_BUFFER_TIMEOUT_MS: Final = 25
"""How long nsqd may keep a message to fill its buffer: the least it advises."""
OVERFLOW_DELAY_S: Final = 2.0
"""Messages beyond the held bound (after a lost connection) come again after this."""
QUIET_S: Final = 0.1
"""After intake has stopped: nothing is under way any more when nothing came for this long."""
DRAIN_LIMIT_S: Final = 2.0
FLUSH_LIMIT_S: Final = 2.0
FIRST_ATTEMPT: Final = 1


@dataclass(frozen=True, slots=True)
class _Timeouts:
    """What one connection agreed on, in seconds."""

    msg_timeout_s: float
    max_msg_timeout_s: float


@dataclass(slots=True)
class _Owned:
    """The newest message object of a delivery; only that one can still be answered."""

    message: Any
    connection: Any
    delivered_at: float


class NsqSource:
    """Messages of one topic and channel, from one or several nsqd."""

    name = "nsq"
    keeps_parked = False

    def __init__(
        self,
        settings: Settings,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_nsq_names(settings.nsq_topic, settings.nsq_channel)
        self._settings = settings
        self._limits = settings.limits
        self._counters = counters
        self._clock = clock
        self._place = f"{settings.nsq_topic}/{settings.nsq_channel}"
        self._owned: dict[str, _Owned] = {}
        self._intake: Intake | None = None
        self._reader: _Reader | None = None
        self._stopping = False
        self._last_arrival = 0.0

    @property
    def extend_every_s(self) -> float:
        """A third of the shortest message timeout in force, or TOUCH_S if that is less."""
        reader = self._reader
        agreed = [t.msg_timeout_s for t in reader.timeouts.values()] if reader else []
        return min([self._limits.touch_s, *(timeout_s / 3 for timeout_s in agreed)])

    async def start(self, intake: Intake) -> None:
        """Connect; an nsqd that is away is tried again for as long as it takes."""
        self._intake = intake
        _quieten_libraries()
        # The reader binds itself to the running loop, so it cannot be made any earlier.
        self._reader = _Reader(self._settings, self._arrived, self._counters)

    async def run(self) -> None:
        """Messages come through the reader's own callbacks."""
        await asyncio.Event().wait()

    def _arrived(self, connection: Any, message: Any) -> None:
        """Own a message: from here on it gets exactly one answer, and never from the library."""
        assert self._intake is not None, "messages come after the start"
        now = self._last_arrival = self._clock()
        message_id = message.id.decode("ascii")
        # Ids are unique within one nsqd only.
        hold_id = f"{connection.id}/{message_id}"
        if self._stopping:
            _requeue(message, 0.0)
            return
        known = hold_id in self._owned
        if not known and not self._intake.free_slots():
            self._counters.add("overflow")
            _requeue(message, OVERFLOW_DELAY_S)
            return
        if known:
            self._counters.add("redelivered_while_held")
            self._replaced(self._owned[hold_id], connection)
        self._owned[hold_id] = _Owned(message, connection, now)
        if not known:
            later = message.attempts != FIRST_ATTEMPT
            self._intake.take(
                Delivery(self.name, self._place, message_id, hold_id, message.body, later)
            )

    @staticmethod
    def _replaced(old: _Owned, connection: Any) -> None:
        """The older object is never answered: take it out of its connection's count."""
        if old.connection is connection:
            connection.in_flight -= 1

    # -- answers ---------------------------------------------------------------------------

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """FIN. On a lost connection there is nobody to tell: the message comes again."""
        for delivery in deliveries:
            owned = self._take_out(delivery)
            if owned is not None:
                owned.message.finish()

    async def park(self, delivery: Delivery, delay_s: float) -> None:
        """Requeue with a delay and without pausing the reader."""
        owned = self._take_out(delivery)
        if owned is not None:
            _requeue(owned.message, delay_s)

    async def hand_back(self, deliveries: Sequence[Delivery]) -> None:
        """Requeue at once."""
        for delivery in deliveries:
            owned = self._take_out(delivery)
            if owned is not None:
                _requeue(owned.message, 0.0)

    def _take_out(self, delivery: Delivery) -> _Owned | None:
        owned = self._owned.pop(delivery.hold_id, None)
        if owned is None or owned.connection.closed():
            self._counters.add("answer_without_connection")
            return None
        return owned

    async def extend(self, deliveries: Sequence[Delivery]) -> Collection[Delivery]:
        """TOUCH, until nsqd would not extend any further: then requeue before it times out.

        A message whose connection is lost is kept: its memory may hold the only copy.
        """
        gone: list[Delivery] = []
        for delivery in deliveries:
            owned = self._owned.get(delivery.hold_id)
            if owned is None or owned.connection.closed():
                continue
            if self._is_last_touch(owned):
                self._counters.add("requeued_before_timeout")
                del self._owned[delivery.hold_id]
                _requeue(owned.message, 0.0)
                gone.append(delivery)
            else:
                owned.message.touch()
        return gone

    def _is_last_touch(self, owned: _Owned) -> bool:
        assert self._reader is not None, "held messages have a reader"
        agreed = self._reader.timeouts.get(owned.connection.id)
        if agreed is None:
            return False
        left_s = owned.delivered_at + agreed.max_msg_timeout_s - self._clock()
        return left_s < 1.5 * self.extend_every_s

    # -- the end ---------------------------------------------------------------------------

    async def stop_intake(self) -> None:
        """Ask for nothing more, and send back what was already under way."""
        self._stopping = True
        if self._reader is None:
            return
        self._reader.stop()
        self._last_arrival = self._clock()
        limit = self._clock() + DRAIN_LIMIT_S
        while self._clock() < min(limit, self._last_arrival + QUIET_S):
            await asyncio.sleep(QUIET_S / 4)

    async def close(self) -> None:
        """Close the connections when the last answers are on their way."""
        if self._reader is None:
            return
        self._reader.stop()
        limit = self._clock() + FLUSH_LIMIT_S
        while self._reader.is_writing() and self._clock() < limit:
            await asyncio.sleep(0.01)
        self._reader.close()
        # The connections end in callbacks of the loop.
        await asyncio.sleep(0)


def _requeue(message: Any, delay_s: float) -> None:
    # Without backoff=False one requeue would stop the whole reader for a while; a delay that
    # is not a whole number would close the connection or be ignored.
    message.requeue(backoff=False, time_ms=max(0, int(delay_s * 1000)))


def _quieten_libraries() -> None:
    """What pynsq says beside errors is said by our own records, without its raw replies."""
    logging.getLogger("nsq").setLevel(logging.ERROR)
    # Each refused connection leaves an exception in a callback of its own.
    application = logging.getLogger("tornado.application")
    if _not_a_refused_connection not in application.filters:
        application.addFilter(_not_a_refused_connection)


def _not_a_refused_connection(record: logging.LogRecord) -> bool:
    return "_connect_callback" not in record.getMessage()


class _Reader(nsq.Reader):
    """pynsq's reader, made quick to reconnect, silent about bodies, and able to stop."""

    def __init__(
        self, settings: Settings, arrived: Callable[[Any, Any], None], counters: Counters
    ) -> None:
        direct = addresses("NSQD_TCP_ADDRESS", settings.nsqd_tcp_address)
        lookup = addresses("NSQ_LOOKUPD_HTTP_ADDRESS", settings.nsq_lookupd_http_address)
        self.timeouts: dict[str, _Timeouts] = {}
        self._arrived = arrived
        self._counters = counters
        self._wanted_ms = int(settings.limits.msg_timeout_s * 1000)
        self._refused_timeout: set[str] = set()
        self._connecting: dict[str, Any] = {}
        self._stopped = False
        super().__init__(
            message_handler=_never_called,
            topic=settings.nsq_topic,
            channel=settings.nsq_channel,
            nsqd_tcp_addresses=direct,
            lookupd_http_addresses=lookup,
            # No limit: pynsq would FIN a message that came too often, unseen by us.
            max_tries=0,
            max_in_flight=settings.bridge_max_in_flight,
            lookupd_poll_interval=LOOKUPD_POLL_S,
            output_buffer_timeout=OUTPUT_BUFFER_TIMEOUT_MS,
            msg_timeout=settings.limits.msg_timeout_s,
            user_agent="chargebridge",
        )

    def stop(self) -> None:
        """Ask for no more messages, and connect to nobody from now on."""
        self._stopped = True
        self.set_max_in_flight(0)

    def is_writing(self) -> bool:
        return any(c.stream is not None and c.stream.writing() for c in self.conns.values())

    # -- messages --------------------------------------------------------------------------

    def _on_message(self, conn: Any, message: Any, **_kwargs: Any) -> None:
        # In place of pynsq's own handling, which answers by itself for a handler that
        # returns or raises, and logs whole bodies.
        message.enable_async()
        self._maybe_update_rdy(conn)
        self._arrived(conn, message)

    # -- connections -----------------------------------------------------------------------

    def connect_to_nsqd(self, host: str, port: int) -> Any:
        address = f"{host}:{port}"
        current = self._connecting.get(address)
        if self._stopped or address in self.conns or (current and not current.closed()):
            return None
        # pynsq lets ten seconds pass between two tries.
        self.connection_attempts.pop(address, None)
        conn = super().connect_to_nsqd(host, port)
        if conn is not None:
            self._connecting[address] = conn
            self.io_loop.call_later(CONNECT_LIMIT_S, self._close_unless_ready, conn)
        return conn

    def _close_unless_ready(self, conn: Any) -> None:
        if self.conns.get(conn.id) is not conn and not conn.closed():
            logger.warning("nsqd_not_ready", extra={"nsqd": conn.id})
            conn.close()

    def _on_connection_ready(self, conn: Any, **kwargs: Any) -> None:
        super()._on_connection_ready(conn, **kwargs)
        self._counters.add("connected")
        logger.info("nsqd_connected", extra={"nsqd": conn.id})

    def _on_connection_close(self, conn: Any, **kwargs: Any) -> None:
        was_ready = conn.id in self.conns
        # The one that is ready or on its way was closed: there is never a second one.
        self._connecting.pop(conn.id, None)
        super()._on_connection_close(conn, **kwargs)
        if self._stopped:
            return
        if was_ready:
            self._counters.add("connection_lost")
            logger.warning("nsqd_connection_lost", extra={"nsqd": conn.id})
        else:
            self._counters.add("connect_failed")
            logger.warning("nsqd_away", extra={"nsqd": conn.id})
        if conn.id in self.nsqd_tcp_addresses:
            pause_s = random.uniform(0.5, 1.5) * RECONNECT_S  # noqa: S311 - jitter
            self.io_loop.call_later(pause_s, self.connect_to_nsqd, conn.host, conn.port)

    def _on_connection_identify(self, conn: Any, data: dict[str, Any], **_kwargs: Any) -> None:
        # A timeout above the server's own maximum would close the connection, again and again.
        if conn.id in self._refused_timeout:
            data.pop("msg_timeout", None)

    def _on_connection_identify_response(
        self, conn: Any, data: dict[str, Any], **_kwargs: Any
    ) -> None:
        agreed = _Timeouts(data["msg_timeout"] / 1000, data["max_msg_timeout"] / 1000)
        self.timeouts[conn.id] = agreed
        if data["msg_timeout"] < self._wanted_ms:
            extra = {"nsqd": conn.id, "msg_timeout_s": agreed.msg_timeout_s}
            logger.warning("nsqd_shorter_msg_timeout", extra=extra)

    def _on_connection_auth_response(self, conn: Any, **_kwargs: Any) -> None:
        logger.info("nsqd_auth_accepted", extra={"nsqd": conn.id})

    def _on_connection_error(self, conn: Any, error: BaseException, **_kwargs: Any) -> None:
        text = str(error)
        code = _error_code(text)
        if code == "E_BAD_BODY" and "msg timeout" in text:
            self._refused_timeout.add(conn.id)
        if text == "failed to unpack size":
            return  # what pynsq makes of every close
        self._counters.add(code)
        # Not fatal: a message that timed out comes again, and the ledger knows it.
        logger.warning("nsqd_error", extra={"nsqd": conn.id, "code": code})

    def _on_heartbeat(self, conn: Any) -> None:
        self._counters.add("heartbeat")


def _never_called(_message: Any) -> None:
    raise AssertionError("messages go to the bridge")


def _error_code(text: str) -> str:
    """`E_FIN_FAILED` and its like, without ids or names; `connection` for what has no code."""
    word = text.removeprefix("b'").split(" ", 1)[0].strip("'\"")
    return word if word.startswith("E_") and word.replace("_", "").isalpha() else "connection"
