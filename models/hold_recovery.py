"""Holds and budgets put together anew from the ledger, after a database restore.

The restored copy knows no hold that was taken since; the ledger has its charges back by then.
Workers and vaults must not run meanwhile. Safe to run again after any end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import text

from models.database import rows
from models.keys import idempotency_key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from sqlalchemy import Engine

BATCH: Final = 500

_RECORDS: Final = text("""
    SELECT b.charge_key, b.customer_id, b.billing_period, b.amount_cents,
        b.state, b.payment_intent_id, b.charge_id, b.first_sent_at, b.last_sent_at,
        r.id AS run_id,
        COALESCE(
            (SELECT h.attempt_epoch FROM vault_holds h
             WHERE h.charge_key = b.charge_key AND (
                h.payment_intent_id = b.payment_intent_id
                OR (h.payment_intent_id IS NULL AND h.charge_id = b.charge_id))
             ORDER BY h.state = 'released', h.id LIMIT 1),
            (SELECT a.attempt_epoch FROM charge_attempts a
             WHERE a.charge_key = b.charge_key AND (
                a.payment_intent_id = b.payment_intent_id OR a.charge_id = b.charge_id)
             ORDER BY a.id DESC LIMIT 1),
            b.attempt_epoch) AS attempt_epoch,
        (SELECT a.endpoint FROM charge_attempts a
         WHERE a.charge_key = b.charge_key AND a.attempt_epoch = b.attempt_epoch
         ORDER BY a.id DESC LIMIT 1) AS endpoint
    FROM billing_records b
    JOIN billing_runs r ON r.billing_run = b.billing_run AND r.currency = b.currency
    WHERE b.charge_key > :after_key
        AND b.state IN ('charged', 'processing', 'requires_action', 'sent', 'review')
        AND b.source <> 'import'
        AND (b.updated_at >= CAST(:since AS timestamptz)
             OR EXISTS (SELECT FROM vault_holds h WHERE h.charge_key = b.charge_key))
    ORDER BY b.charge_key LIMIT :batch""")
"""Each with the epoch of its object: a recharge can have adopted an earlier one's. What was never
held and has not moved since the copy was charged before there was a vault, and stays uncounted."""

_NOT_IN_THE_FUTURE: Final = text("""
    WITH clock AS MATERIALIZED (SELECT ledger_now() AS now)
    UPDATE vault_holds SET updated_at = clock.now,
        first_sent_at = LEAST(first_sent_at, clock.now),
        last_sent_at = LEAST(last_sent_at, clock.now),
        open_forwards = '{}', open_untils = '{}'
    FROM clock
    WHERE state IN ('reserved', 'sent', 'unknown') AND last_sent_at > clock.now
    RETURNING id""")
"""What a clock that was ahead has written would keep every word about a hold from being taken."""

_END_EARLIER: Final = text("""
    UPDATE vault_holds SET state = 'released', outcome = 'recovered', updated_at = ledger_now()
    WHERE charge_key = :charge_key AND attempt_epoch < :attempt_epoch
        AND state IN ('reserved', 'sent', 'unknown')
    RETURNING id""")
"""What is still open of an earlier epoch is canceled before a later one is sent: only one of them
can take money, and one hold is enough. Beside it the later one would have none, and its money
would never be counted."""

_HOLD: Final = text("""
    INSERT INTO vault_holds AS h (run_id, idempotency_key, charge_key, attempt_epoch, endpoint,
        amount_cents, state, outcome, payment_intent_id, charge_id, first_sent_at, last_sent_at,
        late)
    SELECT :run_id, :idempotency_key, :charge_key, :attempt_epoch, :endpoint, :amount_cents,
        :hold_state, 'recovered', CAST(:payment_intent_id AS text), CAST(:charge_id AS text),
        COALESCE(CAST(:first_sent_at AS timestamptz), ledger_now()),
        COALESCE(CAST(:last_sent_at AS timestamptz), ledger_now()), rival.found
    FROM (SELECT EXISTS (
            SELECT FROM vault_holds WHERE charge_key = :charge_key AND state <> 'released'
                AND idempotency_key <> :idempotency_key)) rival(found)
    WHERE :hold_state = 'settled' OR NOT rival.found
    ON CONFLICT (idempotency_key) DO UPDATE SET state = EXCLUDED.state, outcome = 'recovered',
        late = h.late OR EXCLUDED.late, updated_at = ledger_now(),
        payment_intent_id = COALESCE(EXCLUDED.payment_intent_id, h.payment_intent_id),
        charge_id = COALESCE(EXCLUDED.charge_id, h.charge_id)
    WHERE h.state <> 'settled' AND h.state <> EXCLUDED.state
    RETURNING h.id""")

_BUDGETS: Final = text("""
    WITH sums AS (
        SELECT run_id,
            COALESCE(sum(amount_cents) FILTER (WHERE state = 'settled'), 0) AS settled_cents,
            COALESCE(sum(amount_cents) FILTER (
                WHERE state IN ('reserved', 'sent', 'unknown')), 0) AS held_cents
        FROM vault_holds GROUP BY run_id)
    UPDATE billing_runs r SET settled_cents = sums.settled_cents, held_cents = sums.held_cents,
        updated_at = ledger_now()
    FROM sums WHERE sums.run_id = r.id
        AND (r.settled_cents, r.held_cents) <> (sums.settled_cents, sums.held_cents)
    RETURNING r.id""")


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """How many holds were written, and how many budgets then had other sums."""

    holds: int
    budgets: int


def rebuild_holds(engine: Engine, since: datetime, namespace: str, endpoint: str) -> Rebuilt:
    """A settled hold for every charged record, one that holds for every record not yet sure.

    `since`: when the copy was taken; `endpoint`: where a record whose calls were lost will be
    sent. Raises LedgerUnavailable; run it again then.
    """
    rows(engine, _NOT_IN_THE_FUTURE, {})
    holds = sum(
        _rebuild(engine, _hold(record, namespace, endpoint)) for record in _records(engine, since)
    )
    return Rebuilt(holds, len(rows(engine, _BUDGETS, {})))


def _rebuild(engine: Engine, hold: dict[str, Any]) -> int:
    if hold["hold_state"] != "settled":
        rows(engine, _END_EARLIER, hold)
    return len(rows(engine, _HOLD, hold))


def _records(engine: Engine, since: datetime) -> Iterator[dict[str, Any]]:
    after_key = ""
    given = {"since": since, "batch": BATCH}
    while batch := rows(engine, _RECORDS, given | {"after_key": after_key}):
        after_key = batch[-1]["charge_key"]
        yield from (dict(row) for row in batch)


def _hold(record: dict[str, Any], namespace: str, endpoint: str) -> dict[str, Any]:
    if record["payment_intent_id"] is not None:
        endpoint = "payment_intents"
    elif record["charge_id"] is not None:
        endpoint = "charges"
    key = idempotency_key(
        record["customer_id"], record["billing_period"], record["attempt_epoch"], namespace
    )
    return record | {
        "idempotency_key": key,
        # The vault takes a replay for another request if it goes elsewhere.
        "endpoint": record["endpoint"] or endpoint,
        "hold_state": "settled" if record["state"] == "charged" else "unknown",
    }
