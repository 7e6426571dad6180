"""Repeats that are not quite the same: the first event stands, and the difference is told."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from bridges.counters import Counters
    from bridges.held import Held
    from models.decisions import RecordStatus
    from models.events import BillingEvent

logger = logging.getLogger(__name__)

HASH_LENGTH: Final = 16
COUNTED: Final = ("description", "payment_method", "billing_run")


@dataclass(frozen=True, slots=True)
class Wording:
    """What may differ between an event and its repeat without making another charge."""

    event_id: str | None
    description: str
    payment_method: str | None
    billing_run: str


def wording(event: BillingEvent) -> Wording:
    """The part of an event that its fingerprint leaves out."""
    return Wording(event.event_id, event.description, event.payment_method, event.billing_run)


def compare(held: Held, record: RecordStatus, counters: Counters) -> None:
    """Count how a settled repeat differs from the first event.

    Another event id may mean that the producer wanted two charges: it is logged too, by its
    hash, since it may hold anything. An event whose text retention has taken is not compared.
    """
    said = held.wording
    if said is None or record.description is None:
        return
    for name in COUNTED:
        counters.add(f"repeat_other_{name}", int(getattr(said, name) != getattr(record, name)))
    if said.event_id == record.event_id:
        return
    counters.add("repeat_other_event_id")
    extra = {
        "charge_key": held.charge_key,
        "source": held.delivery.source,
        "delivery_id": held.delivery.delivery_id,
        "event_id_sha256": _hashed(said.event_id),
        "first_event_id_sha256": _hashed(record.event_id),
    }
    logger.warning("repeat_with_another_event_id", extra=extra)


def _hashed(event_id: str | None) -> str | None:
    if event_id is None:
        return None
    return hashlib.sha256(event_id.encode()).hexdigest()[:HASH_LENGTH]
