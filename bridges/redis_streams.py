"""The Redis Streams side of a bridge. The only module that sends stream commands."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import ResponseError

from bridges.addresses import check_redis_names
from bridges.backoff import Backoff
from bridges.counters import Counters
from bridges.delivery import Delivery, Intake, SourceUnavailable
from bridges.redis_client import (
    UNAVAILABLE,
    Client,
    close,
    connect,
    forget_connections,
    knows_nodes_by_address,
)
from bridges.redis_replies import (
    CURSOR_END,
    Entry,
    payload_of,
    read_claimed,
    read_group_reply,
    read_range,
    whole_entry,
)
from bridges.redis_scripts import DROP_CONSUMERS, RENEW, TRIM
from models.errors import DeadLetterReason, EventRefused

if TYPE_CHECKING:
    from models.settings import Settings

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S: Final = 5.0
OLDEST_REDIS: Final = (6, 2)
BLOCK_MS: Final = 500
"""How long a read waits for new entries: what a stop or an abandoned entry waits for at most."""
READ_TIMEOUT_S: Final = BLOCK_MS / 1000 + 5.0
"""Above the blocking time, or a quiet stream would look like a lost connection."""
STOP_LIMIT_S: Final = 2.0
"""A read that does not come back by then is given up; what it brings comes round by itself."""
RECLAIM_EVERY_S: Final = 1.0
"""Between two complete searches for entries whose consumer has gone quiet."""
RECLAIM_PAGE_PAUSE_S: Final = 0.05
RECLAIM_PAGE: Final = 100
IDS_PER_SCRIPT: Final = 500
DEAD_CONSUMER_IDLE_S: Final = 3600.0
"""A consumer that was not heard of for so long, and has nothing pending, is removed."""
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
        stream, group = settings.redis_stream, settings.redis_group
        check_redis_names(stream, group, settings.redis_payload_field)
        self._stream = stream.encode()
        self._group = group.encode()
        self._payload_field = settings.redis_payload_field.encode()
        self._place = f"{stream}/{group}"
        self._limits = settings.limits
        self._counters = counters
        self._clock = clock
        self.consumer = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._url = settings.redis_url
        self._commands = connect(self._url, ANSWER_TIMEOUT_S)
        self._reader = connect(self._url, READ_TIMEOUT_S)
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
            if _is_no_group(error):
                self._counters.add("group_lost")
                logger.warning("stream_group_lost", extra={"place": self._place})
                await self._make_group_again()
                return
            await forget_connections(self._reader, error)
            pause_s = self._backoff.failed()
            self._counters.add("read_failed")
            extra = {"error": type(error).__name__, "retry_s": round(pause_s, 1)}
            logger.warning("stream_not_readable", extra=extra)
            await self._pause(pause_s)
            if self._backoff.failures % ANEW_AFTER == 0 and knows_nodes_by_address(self._reader):
                await self._connect_anew()
        else:
            self._backoff.worked()

    async def _connect_anew(self) -> None:
        # Commands that are under way fail, as they would with a node that is gone.
        old = (self._reader, self._commands)
        self._commands = connect(self._url, ANSWER_TIMEOUT_S)
        self._reader = connect(self._url, READ_TIMEOUT_S)
        self._counters.add("connected_anew")
        await self._close_each(old)

    async def _make_group_again(self) -> None:
        try:
            await self.make_group()
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
            await self._drop_consumers()
        if self._trims and now >= self._next_trim:
            self._next_trim = now + TRIM_EVERY_S
            await self._trim()
        await self._read_new(self._intake.free_slots())

    async def _read_new(self, count: int) -> None:
        if count < 1:
            return
        pause_ms = int((self._next_reclaim - self._clock()) * 1000)
        block = ["BLOCK", min(BLOCK_MS, pause_ms)] if pause_ms > 0 else []
        reply = await self._reader.execute_command(
            "XREADGROUP", "GROUP", self._group, self.consumer, "COUNT", count, *block,
            "STREAMS", self._stream, ">",
        )  # fmt: skip
        for entry in read_group_reply(reply):
            self._take(entry, later_round=False)

    def _reclaim_pause_s(self, found: int) -> float:
        """Go on at once where entries lie, slowly through pages without any, then rest."""
        if self._cursor == CURSOR_END:
            return RECLAIM_EVERY_S
        return 0.0 if found else RECLAIM_PAGE_PAUSE_S

    async def _reclaim(self, count: int) -> int:
        """One page of the pending list: entries that nobody has renewed for MIN_IDLE_S.

        Only ids are claimed and the entries read after it, because a claim with its entries
        leaves out the ids of those that were trimmed, and they would stay pending for ever.
        """
        reply = await self._commands.execute_command(
            "XAUTOCLAIM", self._stream, self._group, self.consumer, self._min_idle_ms,
            self._cursor, "COUNT", min(count, RECLAIM_PAGE), "JUSTID",
        )  # fmt: skip
        claimed = read_claimed(reply)
        for entry_id in claimed.dropped:
            self._take(Entry(entry_id.decode("ascii"), None), later_round=True)
        assert self._intake is not None, "a source runs after its start"
        ids = [i for i in claimed.ids if not self._intake.knows(i.decode("ascii"))]
        for entry in await self._entries(ids):
            self._take(entry, later_round=True)
        self._cursor = claimed.cursor
        return len(ids) + len(claimed.dropped)

    async def _entries(self, ids: Sequence[bytes]) -> list[Entry]:
        if not ids:
            return []
        async with self._commands.pipeline(transaction=False) as pipeline:
            for entry_id in ids:
                pipeline.execute_command("XRANGE", self._stream, entry_id, entry_id)
            replies = await pipeline.execute()
        return [read_range(entry_id, reply) for entry_id, reply in zip(ids, replies, strict=True)]

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
            place=self._place,
            delivery_id=entry.entry_id,
            hold_id=entry.entry_id,
            body=body,
            later_round=later_round,
            refused=refused,
        )
        self._intake.take(delivery)

    # -- the group -------------------------------------------------------------------------

    async def make_group(self) -> None:
        """Make the group (and the stream) unless it is there, reading from the very beginning.

        The ledger knows what was charged; an entry left out would be lost.
        """
        try:
            await self._command("XGROUP", "CREATE", self._stream, self._group, "0", "MKSTREAM")
        except SourceUnavailable as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    async def check_version(self) -> None:
        """Raise SourceUnavailable for a server too old to give abandoned entries away."""
        told = await self._command("INFO", "server")
        version = str(told.get("redis_version", "0"))
        found = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
        if found < OLDEST_REDIS:
            raise SourceUnavailable(f"the server is Redis {version}; 6.2 is the oldest that works")

    async def _drop_consumers(self, own: str = "") -> None:
        limit_ms = int(DEAD_CONSUMER_IDLE_S * 1000)
        dropped = await self._commands.eval(
            DROP_CONSUMERS, 1, self._stream, self._group, self.consumer, limit_ms, own
        )
        self._counters.add("consumers_dropped", int(dropped))

    async def _trim(self) -> None:
        """Let go of what every group of the stream has acked."""
        trimmed = await self._commands.eval(TRIM, 1, self._stream)
        self._counters.add("trimmed", int(trimmed))

    # -- answers ---------------------------------------------------------------------------

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """XACK; an id that is pending no more is none of our business any longer."""
        for ids in _batches(deliveries):
            acked = await self._command("XACK", self._stream, self._group, *ids)
            self._counters.add("ack_of_unowned", len(ids) - int(acked))

    async def park(self, delivery: Delivery, delay_s: float) -> None:
        """Nothing to say: it is renewed no more, and comes again after MIN_IDLE_S."""

    async def extend(self, deliveries: Sequence[Delivery]) -> Collection[Delivery]:
        """Reset the idle time of those that are still ours."""
        lost = await self._set_idle(deliveries, 0)
        return [d for d in deliveries if d.delivery_id in lost]

    async def hand_back(self, deliveries: Sequence[Delivery]) -> None:
        """Make these look abandoned, so that another bridge takes them over at once."""
        await self._set_idle(deliveries, self._min_idle_ms * HAND_BACK_FACTOR)

    async def _set_idle(self, deliveries: Sequence[Delivery], idle_ms: int) -> set[str]:
        lost: set[str] = set()
        for ids in _batches(deliveries):
            arguments = (self._stream, self._group, self.consumer, idle_ms, *ids)
            try:
                reply = await self._command("EVAL", RENEW, 1, *arguments)
            except SourceUnavailable as error:
                if not str(error).startswith("NOGROUP"):
                    raise
                return lost  # held bodies may be the only copies: the reading loop makes it anew
            lost |= {entry_id.decode("ascii") for entry_id in reply}
        return lost

    async def _command(self, *arguments: Any) -> Any:
        """One command; Redis's own refusals keep their first word in the message."""
        try:
            return await self._commands.execute_command(*arguments)
        except ResponseError as error:
            await forget_connections(self._commands, error)
            raise SourceUnavailable(_first_word(error)) from None
        except UNAVAILABLE as error:
            raise SourceUnavailable(type(error).__name__) from None

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
        try:
            await self._drop_consumers(own="self")
        except UNAVAILABLE:
            self._counters.add("close_failed")
        await self.disconnect()

    async def disconnect(self) -> None:
        await self._close_each((self._reader, self._commands))

    async def _close_each(self, clients: Sequence[Client]) -> None:
        for client in clients:
            try:
                await close(client)
            except UNAVAILABLE:
                self._counters.add("close_failed")


async def prepare(settings: Settings) -> None:
    """Make the group before anything is read; raises SourceUnavailable with a clear reason."""
    source = RedisStreamSource(settings, Counters())
    try:
        await source.check_version()
        await source.make_group()
    finally:
        await source.disconnect()


def _is_no_group(error: BaseException) -> bool:
    return isinstance(error, ResponseError) and "NOGROUP" in str(error)


def _first_word(error: BaseException) -> str:
    text = str(error)
    return next((w for w in ("NOGROUP", "BUSYGROUP") if w in text), text.split(" ", 1)[0])


def _batches(deliveries: Sequence[Delivery]) -> list[list[str]]:
    ids = [d.delivery_id for d in deliveries]
    return [ids[i : i + IDS_PER_SCRIPT] for i in range(0, len(ids), IDS_PER_SCRIPT)]
