"""The ledger's word on the charge keys that a bridge waits for."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from bridges.backoff import Backoff
from models.decisions import RecordStatus
from models.errors import LedgerUnavailable

if TYPE_CHECKING:
    from bridges.delivery import Delivery
    from bridges.threads import LedgerCalls
    from models.ledger import Ledger
    from models.limits import Limits

logger = logging.getLogger(__name__)

TICK_S: Final = 0.03
"""Between two questions for all held deliveries."""
MAX_PARKED: Final = 10_000
"""Parked deliveries that are watched; one more is taken up again when the broker brings it."""
PARKED_PER_READ: Final = 500
"""Parked keys asked for in one read, in turn: all of them about once a second."""


class CommitWatcher:
    """One indexed query for all keys of a tick, never on the event loop.

    PostgreSQL away is waited for with back-off; whoever asks meanwhile gets no answer, which
    is not the same as "no record".
    """

    def __init__(
        self,
        ledger: Ledger,
        calls: LedgerCalls,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._calls = calls
        self.backoff = Backoff(limits, clock)

    async def read(self, keys: Sequence[str]) -> Mapping[str, RecordStatus] | None:
        """State and fingerprint of those keys that have a record; None: the ledger is away."""
        if not self.backoff.ready:
            return None
        try:
            statuses = await self._calls.call(self._ledger.read_statuses, keys)
        except LedgerUnavailable:
            pause_s = self.backoff.failed()
            logger.warning("ledger_unavailable", extra={"retry_s": round(pause_s, 1)})
            return None
        self.backoff.worked()
        return statuses

    def hurry(self) -> None:
        """The bridge is stopping: ask at once, and wait for an answer only shortly."""
        self.backoff.worked()
        self._calls.hurry()


@dataclass(frozen=True, slots=True)
class ParkedDelivery:
    """A delivery that was let go and waits for its record to settle; its body is gone."""

    delivery: Delivery
    charge_key: str


class ParkedDeliveries:
    """Deliveries that stay ours without a slot, at most MAX_PARKED."""

    def __init__(self, limit: int = MAX_PARKED) -> None:
        self._limit = limit
        self._parked: OrderedDict[str, ParkedDelivery] = OrderedDict()

    def __len__(self) -> int:
        return len(self._parked)

    def __contains__(self, hold_id: str) -> bool:
        return hold_id in self._parked

    def add(self, parked: ParkedDelivery) -> bool:
        """Watch this one; False when there is no room."""
        if len(self._parked) >= self._limit:
            return False
        self._parked[parked.delivery.hold_id] = parked
        return True

    def next_in_turn(self, count: int = PARKED_PER_READ) -> list[ParkedDelivery]:
        """The ones that were not asked for longest; they go to the end of the turn."""
        batch = [self._parked[hold_id] for hold_id in islice(self._parked, count)]
        for parked in batch:
            self._parked.move_to_end(parked.delivery.hold_id)
        return batch

    def remove(self, batch: Sequence[ParkedDelivery]) -> None:
        for parked in batch:
            self._parked.pop(parked.delivery.hold_id, None)

    def all(self) -> list[ParkedDelivery]:
        return list(self._parked.values())
