"""What a bridge counts: one place, so that a log line or a metrics page can show all of it."""

from __future__ import annotations

from collections import Counter


class Counters:
    """Events by name, since the process started. The names are few and fixed in the code."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        if count:
            self._counts[name] += count

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def snapshot(self) -> dict[str, int]:
        """All counts by name, to show."""
        return dict(sorted(self._counts.items()))
