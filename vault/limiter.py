"""How often somebody may be wrong about a key."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

FAILURES: Final = 10
"""Wrong keys from one address in a window; after that nothing of it is looked at."""
WINDOW_S: Final = 60.0
MAX_ADDRESSES: Final = 10_000
MAX_KNOWN: Final = 10_000


class FailureLimiter:
    """Counts failed authentications by address. Lives in the event loop's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def may_try(self, address: str) -> bool:
        """Whether this address has not been wrong too often."""
        began_s, count = self._failures.get(address, (0.0, 0))
        return count < FAILURES or self._clock() - began_s >= WINDOW_S

    def failed(self, address: str) -> None:
        """Remember that a key from there was wrong."""
        now_s = self._clock()
        began_s, count = self._failures.pop(address, (now_s, 0))
        if now_s - began_s >= WINDOW_S:
            began_s, count = now_s, 0
        self._failures[address] = (began_s, count + 1)
        if len(self._failures) > MAX_ADDRESSES:
            self._failures.popitem(last=False)


class KnownKeys:
    """Hashes of keys that were right before: somebody who guesses has none of them.

    They pass however often others behind the same address are wrong.
    """

    def __init__(self) -> None:
        self._hashes: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, key_hash: str) -> bool:
        return key_hash in self._hashes

    def add(self, key_hash: str) -> None:
        self._hashes[key_hash] = None
        if len(self._hashes) > MAX_KNOWN:
            self._hashes.popitem(last=False)
