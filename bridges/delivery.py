"""What the core of a bridge and a broker's adapter say to each other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from models.errors import ChargebridgeError, EventRefused


class SourceUnavailable(ChargebridgeError):  # noqa: N818 - says what happened
    """The broker did not confirm; whether an answer arrived is unknown, and it may be repeated."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """One arrival of a billing event. Nothing in here but `body` may enter a key."""

    source: str
    """`nsq` or `redis`."""
    place: str
    """Topic and channel, or stream and group."""
    delivery_id: str
    """The broker's own id of the message or entry, kept with a dead letter."""
    hold_id: str
    """Names the delivery inside this bridge: the same one coming again has the same."""
    body: bytes
    later_round: bool = False
    """The broker has delivered it before."""
    refused: EventRefused | None = None
    """What the adapter itself found: no body to decode."""


class Intake(Protocol):
    """The core, as an adapter sees it."""

    def take(self, delivery: Delivery) -> None:
        """Own this delivery from now on; one that is held already is not taken twice."""

    def knows(self, hold_id: str) -> bool:
        """Whether the delivery is held or parked here."""

    def free_slots(self) -> int:
        """How many more deliveries may be taken now."""

    async def slot_free(self) -> None:
        """Return when there is room for another delivery."""


class Source(Protocol):
    """A broker's adapter. Each delivery is answered once, by `ack`, `park` or `hand_back`.

    An answer to a delivery that is no longer ours is quiet: the broker delivers it again, and
    the ledger knows it. Methods that may raise SourceUnavailable can be repeated.
    """

    name: str
    keeps_parked: bool
    """Whether parked deliveries stay ours, so that their acks are to be sent from here."""

    @property
    def ready(self) -> bool:
        """Whether the broker is there, as far as has been heard."""

    @property
    def extend_every_s(self) -> float:
        """How often the lease on a held delivery must be extended."""

    async def start(self, intake: Intake) -> None:
        """Begin to take deliveries."""

    async def run(self) -> None:
        """The adapter's own loop, if it needs one; ends after `stop_intake`."""

    async def stop_intake(self) -> None:
        """Take nothing more; return when nothing is on its way any more."""

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Tell the broker "done". Only for what the ledger has committed."""

    async def park(self, delivery: Delivery, delay_s: float) -> None:
        """Let go of it without an ack, to come round again after about this long."""

    async def extend(self, deliveries: Sequence[Delivery]) -> Collection[Delivery]:
        """Keep these ours for longer; returns those that no longer are."""

    async def hand_back(self, deliveries: Sequence[Delivery]) -> None:
        """Let another bridge have these at once."""

    async def close(self) -> None:
        """Drop the connections."""
