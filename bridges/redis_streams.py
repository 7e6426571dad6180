"""The Redis Streams side of a bridge: what it reads, and when it looks for what others left."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final

from bridges.backoff import Backoff
from bridges.counters import Counters
from bridges.delivery import Delivery, Intake, SourceUnavailable
from bridges.redis_client import UNAVAILABLE
from bridges.redis_replies import CURSOR_END, Entry, payload_of, whole_entry
from bridges.stream_group import StreamGroup, is_no_group
from models.errors import DeadLetterReason, EventRefused

if TYPE_CHECKING:
    from models.settings import Settings

logger = logging.getLogger(__name__)

STOP_LIMIT_S: Final = 2.0
"""A read that does not come back by then is given up; what it brings comes round by itself."""
RECLAIM_EVERY_S: Final = 1.0
"""Between two complete searches for entries whose consumer has gone quiet."""
RECLAIM_PAGE_PAUSE_S: Final = 0.05
RECLAIM_PAGE: Final = 100
DROP_CONSUMERS_EVERY_S: Final = 60.0
TRIM_EVERY_S: Final = 10.0
GROUP_PAUSE_S: Final = 1.0
"""After a lost group was made again: one that is lost over and over makes no busy loop."""
ANEW_AFTER: Final = 3
"""Failed reads in a row after which a Cluster is looked for by its URL again. The library knows
only the addresses that its nodes had last, and asks one of them about every read, dead or not."""
HAND_BACK_FACTOR: Final = 10
"""Handed-back entries are given this many times MIN_IDLE_S, beyond any other bridge's own."""


class RedisStreamSource:
    """Entries of one stream and group, as one consumer."""

    name = "redis"
    keeps_parked = True

    def __init__(
        self,
        settings: Settings,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group = StreamGroup(settings, counters)
        self._payload_field = settings.redis_payload_field.encode()
        self._limits = settings.limits
        self._counters = counters
        self._clock = clock
        self._backoff = Backoff(settings.limits, clock)
        self._intake: Intake | None = None
        self._cursor = CURSOR_END
        self._next_reclaim = 0.0
        self._next_drop = 0.0
        self._trims = settings.stream_trim
        self._next_trim = 0.0
        self._stop = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def consumer(self) -> str:
        """The name that this source has in its group."""
        return self._group.consumer

    @property
    def ready(self) -> bool:
        """Whether the last read had an answer."""
        return self._intake is not None and not self._backoff.failing

    @property
    def extend_every_s(self) -> float:
        return min(self._limits.touch_s, self._limits.min_idle_s / 3)

    @property
    def _min_idle_ms(self) -> int:
        return int(self._limits.min_idle_s * 1000)

    # -- intake ----------------------------------------------------------------------------

    async def start(self, intake: Intake) -> None:
        self._intake = intake

    async def run(self) -> None:
        """Take entries until stopped; Redis away is waited for with back-off."""
        try:
            while not self._stop.is_set():
                await self._wait_for_room()
                if self._stop.is_set():
                    return
                await self._run_guarded()
        finally:
            self._ended.set()

    async def _run_guarded(self) -> None:
        try:
            await self.run_once()
        except UNAVAILABLE as error:
            if is_no_group(error):
                self._counters.add("group_lost")
                logger.warning("stream_group_lost", extra={"place": self._group.place})
                await self._make_group_again()
                return
            await self._group.read_failed(error)
            pause_s = self._backoff.failed()
            self._counters.add("read_failed")
            extra = {"error": type(error).__name__, "retry_s": round(pause_s, 1)}
            logger.warning("stream_not_readable", extra=extra)
            await self._pause(pause_s)
            if self._backoff.failures % ANEW_AFTER == 0:
                await self._group.connect_anew()
        else:
            self._backoff.worked()

    async def _make_group_again(self) -> None:
        try:
            await self._group.make()
        except SourceUnavailable as error:
            # Nothing can be read without it, so the source is not ready until it is there.
            pause_s = self._backoff.failed()
            extra = {"error": str(error), "retry_s": round(pause_s, 1)}
            logger.warning("stream_group_not_made", extra=extra)
            await self._pause(pause_s)
        else:
            await self._pause(GROUP_PAUSE_S)

    async def _pause(self, pause_s: float) -> None:
        try:
            await asyncio.wait_for(self._stop.wait(), pause_s)
        except TimeoutError:
            return

    async def _wait_for_room(self) -> None:
        assert self._intake is not None, "a source runs after its start"
        room = asyncio.ensure_future(self._intake.slot_free())
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({room, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            room.cancel()
            stopped.cancel()

    async def run_once(self) -> None:
        """Take over what others have left, then what is new, as much as there is room for."""
        assert self._intake is not None, "a source runs after its start"
        now = self._clock()
        if now >= self._next_reclaim:
            found = await self._reclaim(max(1, self._intake.free_slots() // 2))
            self._next_reclaim = now + self._reclaim_pause_s(found)
        if now >= self._next_drop:
            self._next_drop = now + DROP_CONSUMERS_EVERY_S
            await self._group.drop_consumers()
        if self._trims and now >= self._next_trim:
            self._next_trim = now + TRIM_EVERY_S
            await self._group.trim()
        await self._read_new(self._intake.free_slots())

    async def _read_new(self, count: int) -> None:
        if count < 1:
            return
        pause_ms = int((self._next_reclaim - self._clock()) * 1000)
        for entry in await self._group.read_new(count, pause_ms):
            self._take(entry, later_round=False)

    def _reclaim_pause_s(self, found: int) -> float:
        """Go on at once where entries lie, slowly through pages without any, then rest."""
        if self._cursor == CURSOR_END:
            return RECLAIM_EVERY_S
        return 0.0 if found else RECLAIM_PAGE_PAUSE_S

    async def _reclaim(self, count: int) -> int:
        """One page of what nobody has renewed for MIN_IDLE_S; returns how many were found."""
        assert self._intake is not None, "a source runs after its start"
        page = min(count, RECLAIM_PAGE)
        claimed = await self._group.claim(self._cursor, page, self._min_idle_ms)
        for entry_id in claimed.dropped:
            self._take(Entry(entry_id.decode("ascii"), None), later_round=True)
        ids = [i for i in claimed.ids if not self._intake.knows(i.decode("ascii"))]
        for entry in await self._group.entries(ids):
            self._take(entry, later_round=True)
        self._cursor = claimed.cursor
        return len(ids) + len(claimed.dropped)

    def _take(self, entry: Entry, *, later_round: bool) -> None:
        assert self._intake is not None, "a source runs after its start"
        refused: EventRefused | None = None
        try:
            body = payload_of(entry, self._payload_field)
        except EventRefused as error:
            refused, body = error, whole_entry(entry)
            if error.reason == DeadLetterReason.PAYLOAD_LOST:
                logger.warning("payload_lost", extra={"delivery_id": entry.entry_id})
        delivery = Delivery(
            source=self.name,
            place=self._group.place,
            delivery_id=entry.entry_id,
            hold_id=entry.entry_id,
            body=body,
            later_round=later_round,
            refused=refused,
        )
        self._intake.take(delivery)

    # -- answers ---------------------------------------------------------------------------

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """XACK; an id that is pending no more is none of our business any longer."""
        acked = await self._group.ack(_ids(deliveries))
        self._counters.add("ack_of_unowned", len(deliveries) - acked)

    async def park(self, delivery: Delivery, delay_s: float) -> None:
        """Nothing to say: it is renewed no more, and comes again after MIN_IDLE_S."""

    async def extend(self, deliveries: Sequence[Delivery]) -> Collection[Delivery]:
        """Reset the idle time of those that are still ours."""
        lost = await self._group.set_idle(_ids(deliveries), 0)
        return [d for d in deliveries if d.delivery_id in lost]

    async def hand_back(self, deliveries: Sequence[Delivery]) -> None:
        """Make these look abandoned, so that another bridge takes them over at once."""
        idle_ms = self._min_idle_ms * HAND_BACK_FACTOR
        await self._group.set_idle(_ids(deliveries), idle_ms)

    # -- the end ---------------------------------------------------------------------------

    async def stop_intake(self) -> None:
        """Let the read that is under way come back: what it brings is ours to hand back."""
        self._stop.set()
        try:
            await asyncio.wait_for(self._ended.wait(), STOP_LIMIT_S)
        except TimeoutError:
            logger.warning("stream_read_not_ended")

    async def close(self) -> None:
        """Take the own consumer away, if nothing is pending with it, and disconnect."""
        await self._group.close()


async def prepare(settings: Settings) -> None:
    """Make the group before anything is read; raises SourceUnavailable with a clear reason."""
    group = StreamGroup(settings, Counters())
    try:
        await group.check_version()
        await group.make()
    finally:
        await group.disconnect()


def _ids(deliveries: Sequence[Delivery]) -> list[str]:
    return [delivery.delivery_id for delivery in deliveries]
