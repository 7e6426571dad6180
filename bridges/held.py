"""The deliveries that a bridge owns right now, at most as many as it was told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridges.delivery import Delivery
    from bridges.repeats import Wording
    from models.errors import EventRefused


@dataclass(slots=True)
class Held:
    """One delivery and what is known of it. It leaves the table with its one answer."""

    delivery: Delivery
    taken_at: float
    """On the bridge's monotonic clock."""
    charge_key: str | None = None
    """None until its body was decoded, and for ever if it was refused."""
    fingerprint: str = ""
    wording: Wording | None = None
    """What a repeat may say differently."""
    refused: EventRefused | None = None
    """Why it has to become a dead letter."""
    committed: bool = False
    """The ledger has a settled record or a dead letter for it: it may be acked."""


class HeldDeliveries:
    """Deliveries by their hold id, in the order of their coming."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held: dict[str, Held] = {}
        self._room = asyncio.Event()
        self._room.set()

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Held]:
        return iter(list(self._held.values()))

    def __contains__(self, hold_id: str) -> bool:
        return hold_id in self._held

    @property
    def free(self) -> int:
        return max(0, self.limit - len(self._held))

    def add(self, held: Held) -> None:
        self._held[held.delivery.hold_id] = held
        if not self.free:
            self._room.clear()

    def still(self, held: Held) -> bool:
        """Whether it is here: it may have gone while its keeper waited for something."""
        return self._held.get(held.delivery.hold_id) is held

    def remove(self, held: Held) -> None:
        if self.still(held):
            del self._held[held.delivery.hold_id]
            self._room.set()

    def by_delivery(self, delivery: Delivery) -> Held | None:
        return self._held.get(delivery.hold_id)

    async def room(self) -> None:
        await self._room.wait()
