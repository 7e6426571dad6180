"""Dead letters: deliveries that can never become a charge, kept whole (up to MAX_KEPT_BYTES).

Bridges alone make them; people replay, discard and purge them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import TextClause, text

from models.database import rows
from models.errors import DeadLetterReason

if TYPE_CHECKING:
    from sqlalchemy import Engine, RowMapping


MAX_KEPT_BYTES: Final = 8 * 1024 * 1024
"""Of one body. Redis takes up to half a gigabyte; a row of that size would not be written within
the ledger's time limit, ever, and everything behind it would wait."""


@dataclass(frozen=True, slots=True)
class NewDeadLetter:
    """A delivery as the bridge refuses it. `detail` names fields and rules, never values."""

    source: str
    place: str
    delivery_id: str
    body: bytes
    reason: DeadLetterReason
    detail: str
    charge_key: str | None = None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    id: int
    source: str
    place: str
    delivery_id: str
    body: bytes | None
    body_sha256: str
    body_size: int
    reason: str
    detail: str
    charge_key: str | None
    count: int
    created_at: datetime
    last_seen_at: datetime
    resolved_at: datetime | None
    resolution: str | None
    resolved_by: str | None


_SUMMARY: Final = ", ".join(
    "CAST(NULL AS bytea) AS body" if name == "body" else name
    for name in DeadLetter.__dataclass_fields__
)
_WHOLE: Final = ", ".join(DeadLetter.__dataclass_fields__)

_BURY: Final = text("""
    INSERT INTO dead_letters
        (source, place, delivery_id, body, body_sha256, body_size, reason, detail, charge_key)
    VALUES (:source, :place, :delivery_id, :body, :body_sha256, :body_size, :reason, :detail,
        CAST(:charge_key AS text))
    ON CONFLICT (source, place, delivery_id, body_sha256)
    DO UPDATE SET count = dead_letters.count + 1, last_seen_at = ledger_now()
    RETURNING id""")

_LIST: Final = text(f"""
    SELECT {_SUMMARY} FROM dead_letters
    WHERE id > :after_id AND (:all OR resolved_at IS NULL)
        AND (CAST(:reason AS text) IS NULL OR reason = :reason)
    ORDER BY id LIMIT :limit""")

_SHOW: Final = text(f"SELECT {_WHOLE} FROM dead_letters WHERE id = :id")


_DISCARD: Final = text("""
    UPDATE dead_letters SET resolved_at = ledger_now(), resolved_by = :actor,
        resolution = 'discarded: ' || CAST(:reason AS text)
    WHERE id = :id AND resolved_at IS NULL RETURNING id""")

_PURGE: Final = text("""
    WITH old AS (
        SELECT id FROM dead_letters
        WHERE body IS NOT NULL AND resolved_at IS NOT NULL
            AND (CAST(:id AS bigint) IS NULL OR id = :id)
            AND resolved_at <= ledger_now() - make_interval(secs => :older_than_s)
        ORDER BY id LIMIT :batch FOR UPDATE SKIP LOCKED)
    UPDATE dead_letters SET body = NULL,
        resolution = resolution || '; purged by ' || CAST(:actor AS text)
            || ': ' || CAST(:reason AS text)
    FROM old WHERE dead_letters.id = old.id RETURNING dead_letters.id""")

PURGE_BATCH: Final = 500


class DeadLetters:
    """The dead letters of one database."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def bury(self, letter: NewDeadLetter) -> int:
        """Keep a delivery; the same delivery again only counts up. Returns the row's id.

        Raises LedgerUnavailable: the delivery must then not be acked.
        """
        detail = letter.detail
        if len(letter.body) > MAX_KEPT_BYTES:
            detail += f"; of {len(letter.body)} bytes the first {MAX_KEPT_BYTES} are kept"
        values: dict[str, Any] = {
            "source": letter.source,
            "place": letter.place,
            "delivery_id": letter.delivery_id,
            "body": letter.body[:MAX_KEPT_BYTES],
            "body_sha256": hashlib.sha256(letter.body).hexdigest(),
            "body_size": len(letter.body),
            "reason": letter.reason,
            "detail": detail,
            "charge_key": letter.charge_key,
        }
        return int(self._rows(_BURY, values)[0]["id"])

    def list(
        self,
        *,
        limit: int,
        after_id: int = 0,
        reason: str | None = None,
        include_resolved: bool = False,
    ) -> Sequence[DeadLetter]:
        """Dead letters in the order of their coming, without their bodies."""
        values = {"limit": limit, "after_id": after_id, "reason": reason, "all": include_resolved}
        return [DeadLetter(**row) for row in self._rows(_LIST, values)]

    def show(self, letter_id: int) -> DeadLetter | None:
        """One dead letter, whole."""
        rows = self._rows(_SHOW, {"id": letter_id})
        return DeadLetter(**rows[0]) if rows else None

    def discard(self, letter_id: int, *, actor: str, reason: str) -> bool:
        """Decide that nothing becomes of a letter; False if it is resolved already or not there."""
        return bool(self._rows(_DISCARD, {"id": letter_id, "actor": actor, "reason": reason}))

    def purge(
        self, *, actor: str, reason: str, letter_id: int | None = None, older_than_s: float = 0.0
    ) -> int:
        """Drop the bodies of letters that were resolved this long ago; their hashes stay.

        All of them, or one. Returns how many.
        """
        values = {
            "id": letter_id,
            "older_than_s": older_than_s,
            "batch": PURGE_BATCH,
            "actor": actor,
            "reason": reason,
        }
        purged = 0
        while found := len(self._rows(_PURGE, values)):
            purged += found
        return purged

    def _rows(self, statement: TextClause, values: dict[str, Any]) -> Sequence[RowMapping]:
        return rows(self.engine, statement, values)
