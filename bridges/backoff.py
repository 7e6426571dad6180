"""Waiting for a part that is away: how long, and whether it is time to ask again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from models.decisions import backoff_s

if TYPE_CHECKING:
    from models.limits import Limits


LONGEST_S: Final = 5.0
"""A bridge asks a part that is away at least this often: leases on deliveries run meanwhile,
and one bridge's question is no load."""


class Backoff:
    """Failures in a row of one part, and the moment from which it may be asked again."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._failures = 0
        self._ready_at = 0.0

    @property
    def failures(self) -> int:
        """How many tries in a row have failed."""
        return self._failures

    @property
    def ready(self) -> bool:
        return self._clock() >= self._ready_at

    @property
    def failing(self) -> bool:
        """Whether the last try failed."""
        return self._failures > 0

    @property
    def wait_s(self) -> float:
        """Seconds until it is ready; 0 when it is."""
        return max(0.0, self._ready_at - self._clock())

    def failed(self) -> float:
        """Count a failure; returns the pause in seconds, doubling and with full jitter."""
        self._failures += 1
        draw = random.random()  # noqa: S311 - jitter
        pause_s = min(LONGEST_S, backoff_s(self._failures, self._limits, 1.0)) * draw
        self._ready_at = self._clock() + pause_s
        return pause_s

    def worked(self) -> None:
        self._failures = 0
        self._ready_at = 0.0
