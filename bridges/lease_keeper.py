"""Keeps held deliveries ours while the ledger has not settled them."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from bridges.backoff import Backoff
from bridges.delivery import SourceUnavailable

if TYPE_CHECKING:
    from bridges.counters import Counters
    from bridges.delivery import Source
    from bridges.held import HeldDeliveries
    from models.limits import Limits

logger = logging.getLogger(__name__)


class LeaseKeeper:
    """A loop of its own: neither a slow ledger nor an absent task queue may cost a lease."""

    def __init__(
        self, source: Source, held: HeldDeliveries, limits: Limits, counters: Counters
    ) -> None:
        self._source = source
        self._held = held
        self._counters = counters
        self._backoff = Backoff(limits)

    async def run(self) -> None:
        """Extend all leases in time, until cancelled."""
        while True:
            pause_s = self._source.extend_every_s
            await asyncio.sleep(min(pause_s, self._backoff.wait_s or pause_s))
            await self.run_once()

    async def run_once(self) -> None:
        """Extend the lease on everything that is held; let go of what is no longer ours."""
        deliveries = [held.delivery for held in self._held]
        if not deliveries:
            return
        try:
            gone = await self._source.extend(deliveries)
        except SourceUnavailable as error:
            self._backoff.failed()
            self._counters.add("extend_failed")
            logger.warning("extend_failed", extra={"error": str(error)})
            return
        self._backoff.worked()
        self._counters.add("renewed", len(deliveries) - len(gone))
        for delivery in gone:
            held = self._held.by_delivery(delivery)
            if held is not None:
                # Nothing to undo: whoever has it now finds what the ledger knows.
                self._held.remove(held)
                self._counters.add("ownership_lost")
                extra = {"source": delivery.source, "delivery_id": delivery.delivery_id}
                logger.info("ownership_lost", extra=extra)
