"""One stream's group, as one consumer of it. The only module that sends stream commands."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import ResponseError

from bridges.addresses import check_redis_names
from bridges.delivery import SourceUnavailable
from bridges.redis_client import (
    UNAVAILABLE,
    Client,
    close,
    connect,
    forget_connections,
    knows_nodes_by_address,
)
from bridges.redis_replies import (
    Claimed,
    Entry,
    read_claimed,
    read_group_reply,
    read_range,
)
from bridges.redis_scripts import DROP_CONSUMERS, RENEW, TRIM

if TYPE_CHECKING:
    from bridges.counters import Counters
    from models.settings import Settings

ANSWER_TIMEOUT_S: Final = 5.0
OLDEST_REDIS: Final = (6, 2)
BLOCK_MS: Final = 500
"""How long a read waits for new entries: what a stop or an abandoned entry waits for at most."""
READ_TIMEOUT_S: Final = BLOCK_MS / 1000 + 5.0
"""Above the blocking time, or a quiet stream would look like a lost connection."""
IDS_PER_SCRIPT: Final = 500
DEAD_CONSUMER_IDLE_S: Final = 3600.0
"""A consumer that was not heard of for so long, and has nothing pending, is removed."""


class StreamGroup:
    """Two connections: one for the reads that block, one for everything else.

    `read_new`, `claim`, `entries`, `drop_consumers` and `trim` raise what the library raises
    (UNAVAILABLE); the others raise SourceUnavailable.
    """

    def __init__(self, settings: Settings, counters: Counters) -> None:
        stream, group = settings.redis_stream, settings.redis_group
        check_redis_names(stream, group, settings.redis_payload_field)
        self.place = f"{stream}/{group}"
        self.consumer = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._stream = stream.encode()
        self._group = group.encode()
        self._counters = counters
        self._url = settings.redis_url
        self._commands = connect(self._url, ANSWER_TIMEOUT_S)
        self._reader = connect(self._url, READ_TIMEOUT_S)

    # -- what there is to do ---------------------------------------------------------------

    async def read_new(self, count: int, pause_ms: int) -> list[Entry]:
        """Entries that nobody has had; waits for the first up to `pause_ms`, or BLOCK_MS."""
        block = ["BLOCK", min(BLOCK_MS, pause_ms)] if pause_ms > 0 else []
        reply = await self._reader.execute_command(
            "XREADGROUP", "GROUP", self._group, self.consumer, "COUNT", count, *block,
            "STREAMS", self._stream, ">",
        )  # fmt: skip
        return read_group_reply(reply)

    async def claim(self, cursor: bytes, count: int, min_idle_ms: int) -> Claimed:
        """One page of the pending list: the ids that nobody has renewed for `min_idle_ms`.

        Only ids are claimed and the entries read after it, because a claim with its entries
        leaves out the ids of those that were trimmed, and they would stay pending for ever.
        """
        reply = await self._commands.execute_command(
            "XAUTOCLAIM", self._stream, self._group, self.consumer, min_idle_ms,
            cursor, "COUNT", count, "JUSTID",
        )  # fmt: skip
        return read_claimed(reply)

    async def entries(self, ids: Sequence[bytes]) -> list[Entry]:
        """The entries of these ids; one that was trimmed has no fields."""
        if not ids:
            return []
        async with self._commands.pipeline(transaction=False) as pipeline:
            for entry_id in ids:
                pipeline.execute_command("XRANGE", self._stream, entry_id, entry_id)
            replies = await pipeline.execute()
        return [read_range(entry_id, reply) for entry_id, reply in zip(ids, replies, strict=True)]

    # -- what is said about entries --------------------------------------------------------

    async def ack(self, ids: Sequence[str]) -> int:
        """XACK; returns how many of them were pending."""
        acked = 0
        for some in _batches(ids):
            acked += int(await self._command("XACK", self._stream, self._group, *some))
        return acked

    async def set_idle(self, ids: Sequence[str], idle_ms: int) -> set[str]:
        """Make those that are still ours look as if nobody had touched them for `idle_ms`.

        Returns the ids that somebody else owns by now.
        """
        lost: set[str] = set()
        for some in _batches(ids):
            arguments = (self._stream, self._group, self.consumer, idle_ms, *some)
            try:
                reply = await self._command("EVAL", RENEW, 1, *arguments)
            except SourceUnavailable as error:
                if not str(error).startswith("NOGROUP"):
                    raise
                return lost  # held bodies may be the only copies: the reading loop makes it anew
            lost |= {entry_id.decode("ascii") for entry_id in reply}
        return lost

    # -- the group itself ------------------------------------------------------------------

    async def make(self) -> None:
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

    async def drop_consumers(self, own: str = "") -> None:
        """Remove the dead ones that have nothing pending, and with `self` this one too."""
        limit_ms = int(DEAD_CONSUMER_IDLE_S * 1000)
        dropped = await self._commands.eval(
            DROP_CONSUMERS, 1, self._stream, self._group, self.consumer, limit_ms, own
        )
        self._counters.add("consumers_dropped", int(dropped))

    async def trim(self) -> None:
        """Let go of what every group of the stream has acked."""
        trimmed = await self._commands.eval(TRIM, 1, self._stream)
        self._counters.add("trimmed", int(trimmed))

    # -- connections -----------------------------------------------------------------------

    async def read_failed(self, error: BaseException) -> None:
        """Let no connection of the reads live on that cannot be used any more."""
        await forget_connections(self._reader, error)

    async def connect_anew(self) -> None:
        """Look for a Cluster by its URL again; any other server is found by it at each connect.

        Commands that are under way fail, as they would with a node that is gone.
        """
        if not knows_nodes_by_address(self._reader):
            return
        old = (self._reader, self._commands)
        self._commands = connect(self._url, ANSWER_TIMEOUT_S)
        self._reader = connect(self._url, READ_TIMEOUT_S)
        self._counters.add("connected_anew")
        await self._close_each(old)

    async def close(self) -> None:
        """Take the own consumer away, if nothing is pending with it, and disconnect."""
        try:
            await self.drop_consumers(own="self")
        except UNAVAILABLE:
            self._counters.add("close_failed")
        await self.disconnect()

    async def disconnect(self) -> None:
        """Close both connections."""
        await self._close_each((self._reader, self._commands))

    async def _close_each(self, clients: Sequence[Client]) -> None:
        for client in clients:
            try:
                await close(client)
            except UNAVAILABLE:
                self._counters.add("close_failed")

    async def _command(self, *arguments: Any) -> Any:
        """One command; Redis's own refusals keep their first word in the message."""
        try:
            return await self._commands.execute_command(*arguments)
        except ResponseError as error:
            await forget_connections(self._commands, error)
            raise SourceUnavailable(_first_word(error)) from None
        except UNAVAILABLE as error:
            raise SourceUnavailable(type(error).__name__) from None


def is_no_group(error: BaseException) -> bool:
    """Whether Redis said that the group, or its stream, is not there."""
    return isinstance(error, ResponseError) and "NOGROUP" in str(error)


def _first_word(error: BaseException) -> str:
    text = str(error)
    return next((w for w in ("NOGROUP", "BUSYGROUP") if w in text), text.split(" ", 1)[0])


def _batches(ids: Sequence[str]) -> list[Sequence[str]]:
    return [ids[i : i + IDS_PER_SCRIPT] for i in range(0, len(ids), IDS_PER_SCRIPT)]
