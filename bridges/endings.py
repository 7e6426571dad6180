"""The end of a bridge's loops."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, Final

CANCEL_AGAIN_S: Final = 0.5


async def end_all(loops: Collection[asyncio.Task[Any]]) -> None:
    """Cancel these until every one has ended.

    Once is not enough. Before Python 3.12 `asyncio.wait_for`, under which the Redis client
    writes, loses a cancellation that comes in the same instant as its result: the loop above it
    would go on for ever, and keep leases that nobody works on.
    """
    left: Collection[asyncio.Task[Any]] = [loop for loop in loops if not loop.done()]
    while left:
        for loop in left:
            loop.cancel()
        _, left = await asyncio.wait(left, timeout=CANCEL_AGAIN_S)
