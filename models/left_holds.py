"""Holds that a settled billing record has left behind, for the sweep to resolve.

A worker tells the vault first and then writes the ledger, but a forward that was still open, or a
vault that was away, can leave money held for a charge whose end is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sqlalchemy import text

from models.database import rows

if TYPE_CHECKING:
    from sqlalchemy import Engine

_LEFT: Final = text("""
    SELECT h.id, h.idempotency_key, b.payment_intent_id, b.charge_id,
        CASE WHEN b.state = 'charged' AND (
            h.payment_intent_id = b.payment_intent_id
            OR (h.payment_intent_id IS NULL AND h.charge_id = b.charge_id)
            OR (h.payment_intent_id IS NULL AND h.charge_id IS NULL
                AND h.attempt_epoch = b.attempt_epoch
                AND NOT EXISTS (SELECT FROM vault_holds o
                                WHERE o.charge_key = h.charge_key AND o.state = 'settled')))
        THEN 'settled' ELSE 'failed' END AS outcome
    FROM vault_holds h JOIN billing_records b ON b.charge_key = h.charge_key
    WHERE h.state IN ('reserved', 'sent', 'unknown') AND h.id > :after_id
        AND b.state IN ('charged', 'card_declined', 'rejected', 'blocked', 'voided')
        AND h.attempt_epoch <= b.attempt_epoch
    ORDER BY h.id LIMIT :limit""")


@dataclass(frozen=True, slots=True)
class LeftHold:
    """A hold and what its record says became of it, as `VaultWire.resolve` takes it."""

    id: int
    idempotency_key: str
    outcome: str
    """`settled` or `failed`."""
    payment_intent_id: str | None
    charge_id: str | None


def left_holds(engine: Engine, *, limit: int, after_id: int = 0) -> Sequence[LeftHold]:
    """Held holds of settled records, by id. Open intents and records in review keep theirs."""
    found = rows(engine, _LEFT, {"limit": limit, "after_id": after_id})
    return [
        LeftHold(
            id=row["id"],
            idempotency_key=row["idempotency_key"],
            outcome=row["outcome"],
            payment_intent_id=row["payment_intent_id"] if row["outcome"] == "settled" else None,
            charge_id=row["charge_id"] if row["outcome"] == "settled" else None,
        )
        for row in found
    ]
