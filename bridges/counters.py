"""What a bridge counts: one place, so that a log line or the metrics page can show all of it."""

from __future__ import annotations

from collections import Counter
from typing import Final

from prometheus_client import CollectorRegistry, Histogram

DEAD_LETTER_REASON: Final = "dead_letter."
"""Begins the name of the count of each reason for a dead letter."""
_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Counters:
    """Events by name, since the process started. The names are few and fixed in the code."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self.registry = CollectorRegistry()
        """A registry of its own: nothing is counted by importing a module."""
        self.time_to_commit = Histogram(
            "chargebridge_bridge_time_to_commit_seconds",
            "From taking a delivery to seeing its record settled or its dead letter committed",
            registry=self.registry,
            buckets=_SECONDS,
        )

    def add(self, name: str, count: int = 1) -> None:
        if count:
            self._counts[name] += count

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def snapshot(self) -> dict[str, int]:
        """All counts by name, to show."""
        return dict(sorted(self._counts.items()))
