"""Blocking calls off the event loop, each waited for no longer than a limit."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, Final, ParamSpec, TypeVar

from models.errors import LedgerUnavailable

P = ParamSpec("P")
T = TypeVar("T")

LEDGER_LIMIT_S: Final = 12.0
"""A little above the ledger's own statement timeout: a server that is frozen keeps none."""
HURRIED_LIMIT_S: Final = 1.0
"""The same for a bridge that is stopping."""


class DaemonThreads(Executor):
    """A few threads that never keep the process from ending, whatever they hang on."""

    def __init__(self, count: int, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._count = count
        for number in range(count):
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True).start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call this in one of the threads."""
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # the caller gets it, whatever it is
                future.set_exception(error)

        self._calls.put(call)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end when they have nothing left to do; waits for none of them."""
        for _ in range(self._count):
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


class LedgerCalls:
    """One call to the ledger at a time, and never a second one behind one that hangs."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._running: asyncio.Future[Any] | None = None
        self._hurry = asyncio.Event()

    def hurry(self) -> None:
        """From now on there is little time: the bridge is stopping."""
        self._hurry.set()

    async def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Its result; raises LedgerUnavailable as the call does, or when it takes too long."""
        if self._running is not None and not self._running.done():
            raise LedgerUnavailable("the ledger has not answered an earlier question")
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._executor, function, *arguments)
        self._running = running
        if not await self._wait(running):
            running.add_done_callback(_look_at)
            raise LedgerUnavailable("the ledger did not answer in time")
        return running.result()

    async def _wait(self, running: asyncio.Future[Any]) -> bool:
        hurried: asyncio.Future[Any] = asyncio.ensure_future(self._hurry.wait())
        waits = {running, hurried}
        try:
            await asyncio.wait(waits, timeout=LEDGER_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
            if hurried.done() and not running.done():
                await asyncio.wait({running}, timeout=HURRIED_LIMIT_S)
        finally:
            hurried.cancel()
        return running.done()


def _look_at(late: asyncio.Future[Any]) -> None:
    """What a late call came to is of no use, and no reason to complain either."""
    if not late.cancelled():
        late.exception()
