"""What the broker is told: "done" for what is committed, and nothing that it could forget else."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Final

from bridges.backoff import Backoff
from bridges.commit_watcher import ParkedDeliveries, ParkedDelivery
from bridges.delivery import Delivery, Source, SourceUnavailable
from models import faults

if TYPE_CHECKING:
    from bridges.counters import Counters
    from bridges.held import Held, HeldDeliveries
    from models.limits import Limits

logger = logging.getLogger(__name__)

PARK_JITTER: Final = 0.2
"""Parked deliveries come round again up to this share sooner or later, not all at once."""


class Answers:
    """The one answer that each delivery gets; with it, the delivery leaves its table."""

    def __init__(
        self,
        source: Source,
        held: HeldDeliveries,
        parked: ParkedDeliveries,
        *,
        executor: Executor,
        limits: Limits,
        counters: Counters,
    ) -> None:
        self._source = source
        self._held = held
        self._parked = parked
        self._executor = executor
        self._limits = limits
        self._counters = counters
        self._backoff = Backoff(limits)

    async def give(self, parking: Sequence[Held], settled: Sequence[ParkedDelivery]) -> None:
        """Ack what is committed and let go of what is parked."""
        committed = [h for h in self._held if h.committed]
        parking = [h for h in parking if self._held.still(h)]
        if not (committed or settled or parking) or not self._backoff.ready:
            return
        try:
            if committed or settled:
                await self._ack(committed, settled)
            if parking:
                await self._park(parking)
        except SourceUnavailable as error:
            # Still held and still committed: the ack can be sent again.
            self._counters.add("answer_failed")
            extra = {"error": str(error), "retry_s": round(self._backoff.failed(), 1)}
            logger.warning("answer_failed", extra=extra)
        else:
            self._backoff.worked()

    async def _ack(self, committed: Sequence[Held], settled: Sequence[ParkedDelivery]) -> None:
        await self._at("bridge.before_ack")
        deliveries = [h.delivery for h in committed] + [p.delivery for p in settled]
        await self._source.ack(deliveries)
        for held in committed:
            self._held.remove(held)
        self._parked.remove(settled)
        self._counters.add("acked", len(deliveries))
        await self._at("bridge.after_ack")

    async def _park(self, parking: Sequence[Held]) -> None:
        for held in parking:
            share = random.uniform(1 - PARK_JITTER, 1 + PARK_JITTER)  # noqa: S311 - jitter
            await self._source.park(held.delivery, share * self._limits.park_delay_s)
            self._held.remove(held)
            if self._source.keeps_parked and held.charge_key is not None:
                self._parked.add(ParkedDelivery(_without_body(held.delivery), held.charge_key))
        self._counters.add("parked", len(parking))

    async def _at(self, name: str) -> None:
        """Stand at a fault point without holding up the event loop."""
        if not faults.enabled():
            return
        await asyncio.get_running_loop().run_in_executor(self._executor, faults.fault_point, name)

    async def hand_back(self) -> None:
        """Let another bridge have all that is still held or parked."""
        held = list(self._held)
        rest = [h.delivery for h in held] + [p.delivery for p in self._parked.all()]
        if not rest:
            return
        try:
            await self._source.hand_back(rest)
        except SourceUnavailable as error:
            # They come round by themselves when their lease has run out.
            logger.warning("hand_back_failed", extra={"error": str(error)})
            return
        for one in held:
            self._held.remove(one)
            extra = {"source": one.delivery.source, "delivery_id": one.delivery.delivery_id}
            logger.info("handed_back", extra=extra)
        self._counters.add("handed_back", len(rest))


def _without_body(delivery: Delivery) -> Delivery:
    return Delivery(
        source=delivery.source,
        place=delivery.place,
        delivery_id=delivery.delivery_id,
        hold_id=delivery.hold_id,
        body=b"",
        later_round=True,
    )
