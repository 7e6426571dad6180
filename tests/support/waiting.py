"""The one place where tests wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.02


class NeverHappenedError(AssertionError):
    """What a test waited for did not come in time."""


def wait_until(condition: Callable[[], T], timeout_s: float, what: str) -> T:
    """Polls until the condition is true and returns its value; raises with `what` otherwise."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while True:
        is_last_look = time.monotonic() > deadline
        if value := condition():
            return value
        if is_last_look:
            raise NeverHappenedError(f"not within {timeout_s:g} s: {what}")
        pause.wait(POLL_S)


def stays(condition: Callable[[], object], for_s: float, what: str) -> None:
    """Asserts that the condition is true now and remains so for the whole time."""
    deadline = time.monotonic() + for_s
    pause = threading.Event()
    while True:
        # Looked at once at least, however late this process comes to it.
        if not condition():
            raise AssertionError(f"did not stay so for {for_s:g} s: {what}")
        pause.wait(POLL_S)
        if time.monotonic() >= deadline:
            return
