"""The NSQ side of a bridge: which messages are held, and the one answer that each gets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from bridges.addresses import check_nsq_names
from bridges.delivery import Delivery, Intake
from bridges.nsq import Reader, quieten_libraries

if TYPE_CHECKING:
    from bridges.counters import Counters
    from models.settings import Settings

OVERFLOW_DELAY_S: Final = 2.0
"""Messages beyond the held bound (after a lost connection) come again after this."""
QUIET_S: Final = 0.1
"""After intake has stopped: nothing is under way any more when nothing came for this long."""
DRAIN_LIMIT_S: Final = 2.0
FLUSH_LIMIT_S: Final = 2.0
WATCH_EVERY_S: Final = 5.0
"""Between two looks for an nsqd that has messages and may send none."""
FIRST_ATTEMPT: Final = 1


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
        self._reader: Reader | None = None
        self._stopping = False
        self._last_arrival = 0.0

    @property
    def ready(self) -> bool:
        """Whether at least one nsqd is connected."""
        return self._reader is not None and bool(self._reader.conns)

    @property
    def extend_every_s(self) -> float:
        """A third of the shortest message timeout in force, or TOUCH_S if that is less."""
        reader = self._reader
        agreed = [t.msg_timeout_s for t in reader.timeouts.values()] if reader else []
        return min([self._limits.touch_s, *(timeout_s / 3 for timeout_s in agreed)])

    async def start(self, intake: Intake) -> None:
        """Connect; an nsqd that is away is tried again for as long as it takes."""
        self._intake = intake
        quieten_libraries()
        # The reader binds itself to the running loop, so it cannot be made any earlier.
        self._reader = Reader(self._settings, self._arrived, self._counters)

    async def run(self) -> None:
        """Messages come through the reader's own callbacks; see that they can."""
        while not self._stopping:
            await asyncio.sleep(WATCH_EVERY_S)
            self.run_once()

    def run_once(self) -> None:
        """Have messages sent to us again where there is room for them and none may come."""
        assert self._reader is not None, "a source runs after its start"
        assert self._intake is not None, "a source runs after its start"
        if self._intake.free_slots():
            self._reader.wake_idle_connections()

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
        self._answer(deliveries, lambda message: message.finish())

    async def park(self, delivery: Delivery, delay_s: float) -> None:
        """Requeue with a delay and without pausing the reader."""
        owned = self._take_out(delivery)
        if owned is not None:
            _requeue(owned.message, delay_s)

    async def hand_back(self, deliveries: Sequence[Delivery]) -> None:
        """Requeue at once."""
        self._answer(deliveries, lambda message: _requeue(message, 0.0))

    def _answer(self, deliveries: Sequence[Delivery], say: Callable[[Any], None]) -> None:
        """Give each its one answer; all those to one nsqd in one write."""
        messages: dict[Any, list[Any]] = {}
        for delivery in deliveries:
            owned = self._take_out(delivery)
            if owned is not None:
                messages.setdefault(owned.connection, []).append(owned.message)
        for connection, owned_there in messages.items():
            with _one_write(connection):
                for message in owned_there:
                    say(message)

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


@contextmanager
def _one_write(connection: Any) -> Iterator[None]:
    """What the library says to an nsqd meanwhile goes out together.

    A system call for each of hundreds of FINs takes longer than everything else about them.
    """
    said: list[bytes] = []
    connection.send = said.append
    try:
        yield
    finally:
        del connection.send
        try:
            connection.send(b"".join(said))
        except Exception:
            # As the library has it for each: the messages come again by another connection.
            connection.close()


def _requeue(message: Any, delay_s: float) -> None:
    # Without backoff=False one requeue would stop the whole reader for a while; a delay that
    # is not a whole number would close the connection or be ignored.
    message.requeue(backoff=False, time_ms=max(0, int(delay_s * 1000)))
