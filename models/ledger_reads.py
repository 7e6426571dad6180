"""Reads of the ledger for people: one record with its history, and lists of records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import TextClause, text

from models.database import rows
from models.ledger_sql import COLUMNS
from models.records import Record, record_from_row
from models.states import SETTLED

if TYPE_CHECKING:
    from sqlalchemy import Engine, RowMapping

    from models.states import State

_BY_IDENTITY: Final = text(
    f"SELECT {COLUMNS} FROM billing_records "
    "WHERE customer_id = :customer_id AND billing_period = :billing_period"
)
_BY_KEYS: Final = text(f"SELECT {COLUMNS} FROM billing_records WHERE charge_key = ANY(:keys)")
_ATTEMPTS: Final = text("""
    SELECT attempt_epoch, idempotency_key, endpoint, started_at, finished_at, outcome,
        http_status, stripe_request_id, replayed, error_code, payment_intent_id, charge_id
    FROM charge_attempts WHERE charge_key = :charge_key ORDER BY id""")
_SINCE: Final = """COALESCE(
        CASE WHEN attempt_epoch > 0 THEN (
            SELECT max(at) FROM ledger_events e
            WHERE e.charge_key = billing_records.charge_key AND e.move = 'recharge') END,
        created_at)"""
"""From when on a record is unsettled: one that is charged again was settled meanwhile."""
OLDEST_UNSETTLED: Final = text(f"""
    SELECT EXTRACT(EPOCH FROM ledger_now() - min({_SINCE}))::double precision AS age_s
    FROM billing_records WHERE state IN ('reserved', 'sent')""")
_COUNT_UNSETTLED: Final = text(f"""
    SELECT count(*) AS records FROM (
        SELECT 1 FROM billing_records
        WHERE state IN ('reserved', 'sent')
            AND {_SINCE} < ledger_now() - make_interval(secs => :age_s)
        LIMIT :at_most) AS old""")
_NO_SWEEP: Final = text("""
    WITH limits AS MATERIALIZED (
        SELECT ledger_now() - make_interval(secs => :late_s) AS long_ago)
    SELECT EXISTS (
        SELECT FROM billing_records, limits
        WHERE state IN ('reserved', 'sent') AND updated_at <= long_ago
            AND (lease_expires_at IS NULL OR lease_expires_at <= long_ago)
            AND (next_attempt_at IS NULL OR next_attempt_at <= long_ago))
        AND NOT EXISTS (
            SELECT FROM billing_records, limits
            WHERE state IN ('reserved', 'sent') AND dispatched_at > long_ago) AS found""")
"""A record long due, and none at all that was handed out lately."""
_SETTLES: Final = text(f"""
    SELECT bool_or(to_state IN ({", ".join(f"'{state}'" for state in sorted(SETTLED))})) AS settles
    FROM (SELECT to_state FROM ledger_events ORDER BY id DESC LIMIT :moves) AS latest""")
_RECOVERING: Final = text("SELECT recovering_since FROM deployment")
_EVENTS: Final = text("""
    SELECT at, attempt_epoch, from_state, to_state, move, actor, reason, request_id
    FROM ledger_events WHERE charge_key = :charge_key ORDER BY id""")
LIST: Final = text(f"""
    SELECT {COLUMNS} FROM billing_records
    WHERE charge_key > :after_key
        AND (CAST(:state AS text) IS NULL OR state = :state)
        AND (CAST(:billing_period AS text) IS NULL OR billing_period = :billing_period)
        AND (CAST(:billing_run AS text) IS NULL OR billing_run = :billing_run)
        AND (CAST(:customer_id AS text) IS NULL OR customer_id = :customer_id)
    ORDER BY charge_key LIMIT :limit""")
_COUNTS: Final = text("""
    SELECT state, COALESCE(currency, '') AS currency, count(*) AS records,
        COALESCE(sum(amount_cents), 0)::bigint AS total_cents
    FROM billing_records GROUP BY 1, 2 ORDER BY 1, 2""")


@dataclass(frozen=True, slots=True)
class History:
    """A record, every call that was made for it, and every move with its reason."""

    record: Record
    attempts: Sequence[dict[str, Any]]
    events: Sequence[dict[str, Any]]


class LedgerReads:
    """Read-only views of the ledger."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def show(self, customer_id: str, billing_period: str) -> History | None:
        """The record of one identity with its whole history."""
        identity = {"customer_id": customer_id, "billing_period": billing_period}
        rows = self._rows(_BY_IDENTITY, identity)
        if not rows:
            return None
        key = {"charge_key": rows[0]["charge_key"]}
        return History(
            record=record_from_row(rows[0]),
            attempts=[dict(row) for row in self._rows(_ATTEMPTS, key)],
            events=[dict(row) for row in self._rows(_EVENTS, key)],
        )

    def list(
        self,
        *,
        limit: int,
        after_key: str = "",
        state: State | None = None,
        billing_period: str | None = None,
        billing_run: str | None = None,
        customer_id: str | None = None,
    ) -> Sequence[Record]:
        """Records in key order; page on with the last one's charge key."""
        values = {
            "limit": limit,
            "after_key": after_key,
            "state": state,
            "billing_period": billing_period,
            "billing_run": billing_run,
            "customer_id": customer_id,
        }
        return [record_from_row(row) for row in self._rows(LIST, values)]

    def by_keys(self, keys: Sequence[str]) -> Sequence[Record]:
        """The records of these charge keys, as far as there are any."""
        return [record_from_row(row) for row in self._rows(_BY_KEYS, {"keys": [*keys]})]

    def attempts(self, charge_key: str) -> Sequence[dict[str, Any]]:
        """Every call that was made for a charge key, over all its epochs, oldest first."""
        return [dict(row) for row in self._rows(_ATTEMPTS, {"charge_key": charge_key})]

    def oldest_unsettled_s(self) -> float | None:
        """For how long the oldest record that is not settled is so; None when all are settled."""
        age_s = self._rows(OLDEST_UNSETTLED, {})[0]["age_s"]
        return None if age_s is None else float(age_s)

    def count_unsettled(self, age_s: float, at_most: int) -> int:
        """How many records are not settled for longer; counted no further than told."""
        values = {"age_s": age_s, "at_most": at_most}
        return int(self._rows(_COUNT_UNSETTLED, values)[0]["records"])

    def no_sweep(self, late_s: float) -> bool:
        """Whether a record is due for longer than that and nobody hands out what is due."""
        return bool(self._rows(_NO_SWEEP, {"late_s": late_s})[0]["found"])

    def settles(self, moves: int) -> bool:
        """Whether any of the latest so many moves of all records has settled one."""
        return bool(self._rows(_SETTLES, {"moves": moves})[0]["settles"])

    def recovering(self) -> bool:
        """Whether a recovery after a database restore was begun and not finished."""
        return any(row["recovering_since"] is not None for row in self._rows(_RECOVERING, {}))

    def counts(self) -> Sequence[dict[str, Any]]:
        """Records and money (smallest units) by state and currency."""
        return [dict(row) for row in self._rows(_COUNTS, {})]

    def _rows(self, statement: TextClause, values: dict[str, Any]) -> Sequence[RowMapping]:
        return rows(self.engine, statement, values)
