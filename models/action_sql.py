"""The statements behind manual actions, polling, import and recovery.

Like those of `ledger_sql`, each carries its audit row and names the state it expects.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import TextClause, text

from models.ledger_sql import CLEAR_HISTORY, CLOCK, COLUMNS, OBJECTS, RELEASE, UNLEASED, audit

BY_IDENTITY: Final = text(
    f"SELECT {COLUMNS} FROM billing_records "
    "WHERE customer_id = :customer_id AND billing_period = :billing_period"
)
REQUEST_SEEN: Final = text("SELECT charge_key FROM ledger_events WHERE request_id = :request_id")

_AS_READ: Final = "charge_key = :charge_key AND state = :from_state AND attempt_epoch = :epoch"


def _moved(assignments: str) -> TextClause:
    return text(f"""
    WITH {CLOCK},
    moved AS (
        UPDATE billing_records SET {assignments}, updated_at = clock.now, {RELEASE}
        FROM clock
        WHERE {_AS_READ} AND {UNLEASED}
            AND NOT EXISTS (SELECT FROM ledger_events WHERE request_id = :request_id)
        RETURNING {COLUMNS}),
    {audit("moved", ":from_state")}
    SELECT {COLUMNS} FROM moved""")


RECHARGE: Final = _moved(
    f"state = 'reserved', attempt_epoch = attempt_epoch + 1, {CLEAR_HISTORY}, deferrals = 0, "
    "request_id = :request_id, payment_method = CAST(:payment_method AS text), "
    "payment_intent_id = NULL, charge_id = NULL, error_code = NULL, decline_code = NULL, "
    "error_message = NULL, next_attempt_at = NULL, dispatched_at = NULL, settled_at = NULL"
)
"""A new epoch: its objects and errors start empty; the old ones stand with their attempts."""

VOID: Final = _moved(
    f"state = 'voided', {CLEAR_HISTORY}, settled_at = clock.now, next_attempt_at = NULL"
)

RESOLVE: Final = _moved(
    "state = :to_state, settled_at = clock.now, next_attempt_at = NULL, "
    "payment_intent_id = COALESCE(CAST(:payment_intent_id AS text), payment_intent_id), "
    "charge_id = COALESCE(CAST(:charge_id AS text), charge_id)"
)

TOMBSTONE: Final = text(f"""
    WITH {CLOCK},
    moved AS (
        INSERT INTO billing_records
            (customer_id, billing_period, charge_key, state, source, created_at, updated_at,
             settled_at)
        SELECT :customer_id, :billing_period, :charge_key, 'voided', 'operator', clock.now,
            clock.now, clock.now
        FROM clock ON CONFLICT DO NOTHING RETURNING {COLUMNS}),
    {audit("moved", "CAST(NULL AS text)")}
    SELECT {COLUMNS} FROM moved""")

REPLAY: Final = text(f"""
    WITH {CLOCK},
    moved AS (
        INSERT INTO billing_records (customer_id, billing_period, charge_key, fingerprint,
            amount_cents, currency, stripe_customer_id, billing_run, source, event, state,
            created_at, updated_at)
        SELECT :customer_id, :billing_period, :charge_key, :fingerprint, :amount_cents, :currency,
            :stripe_customer_id, :billing_run, :source, CAST(:event AS jsonb), 'reserved',
            clock.now, clock.now
        FROM clock
        WHERE EXISTS (SELECT FROM dead_letters WHERE id = :letter_id AND resolved_at IS NULL)
        ON CONFLICT DO NOTHING RETURNING {COLUMNS}),
    letter AS (
        UPDATE dead_letters SET resolved_at = clock.now, resolution = 'replayed',
            resolved_by = :actor
        FROM clock WHERE id = :letter_id AND EXISTS (SELECT FROM moved)),
    {audit("moved", "CAST(NULL AS text)")}
    SELECT {COLUMNS} FROM moved""")
"""One statement: either the row is there and the letter resolved, or neither."""

TAKE_POLLS: Final = text(f"""
    WITH clock AS MATERIALIZED (SELECT ledger_now() AS now),
    due AS (
        SELECT id FROM billing_records
        WHERE state IN ('processing', 'requires_action')
            AND next_attempt_at <= (SELECT now FROM clock)
        ORDER BY next_attempt_at LIMIT :batch
        FOR UPDATE OF billing_records SKIP LOCKED),
    taken AS (
        UPDATE billing_records r SET deferrals = deferrals + 1,
            next_attempt_at = clock.now + make_interval(secs => :hold_s)
        FROM due, clock WHERE r.id = due.id
        RETURNING r.*)
    SELECT {COLUMNS}, clock.now FROM taken, clock""")

POLLED: Final = text(f"""
    WITH {CLOCK},
    moved AS (
        UPDATE billing_records SET state = :to_state, {OBJECTS},
            next_attempt_at = clock.now + make_interval(secs => CAST(:poll_s AS double precision))
        FROM clock WHERE {_AS_READ} RETURNING {COLUMNS}),
    {audit("moved", ":from_state")}
    SELECT {COLUMNS} FROM moved""")

STILL_OPEN: Final = text(f"""
    WITH {CLOCK}
    UPDATE billing_records SET next_attempt_at = clock.now + make_interval(secs => :poll_s)
    FROM clock WHERE {_AS_READ} RETURNING {COLUMNS}""")

_GIVEN: Final = """given AS (
        SELECT * FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS t(
            customer_id text, billing_period text, charge_key text, fingerprint text,
            amount_cents bigint, currency text, stripe_customer_id text, billing_run text,
            payment_intent_id text, charge_id text, attempt_epoch integer, state text,
            event jsonb, created double precision))"""
_IS_OTHER_MONEY: Final = (
    "(r.amount_cents IS NOT NULL"
    " AND (r.amount_cents, r.currency) IS DISTINCT FROM (g.amount_cents, g.currency))"
)


def _insert_seen(source: str, state: str = "'charged'", due: str = "NULL") -> str:
    return f"""inserted AS (
        INSERT INTO billing_records (customer_id, billing_period, charge_key, fingerprint,
            amount_cents, currency, stripe_customer_id, billing_run, payment_intent_id, charge_id,
            attempt_epoch, event, state, source, created_at, updated_at, settled_at,
            next_attempt_at)
        SELECT customer_id, billing_period, charge_key, fingerprint, amount_cents, currency,
            stripe_customer_id, billing_run, payment_intent_id, charge_id,
            COALESCE(attempt_epoch, 0), event, {state}, '{source}',
            COALESCE(LEAST(to_timestamp(created), clock.now), clock.now), clock.now, clock.now,
            {due}
        FROM given, clock
        ON CONFLICT DO NOTHING
        RETURNING charge_key, attempt_epoch, state)"""


IMPORT: Final = text(f"""
    WITH {CLOCK}, {_GIVEN}, {_insert_seen("import")},
    {audit("inserted", "CAST(NULL AS text)")}
    SELECT charge_key FROM inserted""")

IMPORTED_AS: Final = text(
    "SELECT charge_key, charge_id, payment_intent_id, amount_cents, currency "
    "FROM billing_records WHERE charge_key = ANY(:keys)"
)

RECOVER_CHARGED: Final = text(f"""
    WITH {CLOCK}, {_GIVEN},
    before AS (
        SELECT r.charge_key, r.state FROM billing_records r JOIN given USING (charge_key)
        WHERE r.state <> 'charged' FOR UPDATE OF r),
    updated AS (
        UPDATE billing_records r
        SET state = CASE WHEN {_IS_OTHER_MONEY} THEN 'review' ELSE 'charged' END,
            settled_at = clock.now,
            next_attempt_at = NULL, updated_at = clock.now, {RELEASE},
            attempt_epoch = GREATEST(r.attempt_epoch, COALESCE(g.attempt_epoch, 0)),
            payment_intent_id = COALESCE(g.payment_intent_id, r.payment_intent_id),
            charge_id = COALESCE(g.charge_id, r.charge_id),
            fingerprint = COALESCE(r.fingerprint, g.fingerprint),
            amount_cents = COALESCE(r.amount_cents, g.amount_cents),
            currency = COALESCE(r.currency, g.currency),
            stripe_customer_id = COALESCE(r.stripe_customer_id, g.stripe_customer_id),
            billing_run = COALESCE(r.billing_run, g.billing_run)
        FROM given g, before b, clock
        WHERE r.charge_key = g.charge_key AND b.charge_key = r.charge_key
        RETURNING r.charge_key, r.attempt_epoch, b.state AS from_state, r.state),
    {_insert_seen("recovery")},
    done AS (
        SELECT charge_key, attempt_epoch, from_state, state FROM updated
        UNION ALL SELECT charge_key, attempt_epoch, NULL, state FROM inserted),
    {audit("done", "from_state")}
    SELECT charge_key, state FROM done""")
"""Stripe's success wins over whatever the copy says; of another amount it is for a person."""

RECOVER_OPEN: Final = text(f"""
    WITH {CLOCK}, {_GIVEN},
    before AS (
        SELECT r.charge_key, r.state FROM billing_records r JOIN given g USING (charge_key)
        WHERE g.attempt_epoch > r.attempt_epoch
            AND r.state IN ('card_declined', 'rejected', 'requires_action', 'processing', 'blocked')
        FOR UPDATE OF r),
    updated AS (
        UPDATE billing_records r SET state = g.state, settled_at = clock.now,
            next_attempt_at = clock.now, updated_at = clock.now, {RELEASE},
            attempt_epoch = g.attempt_epoch, payment_intent_id = g.payment_intent_id,
            charge_id = g.charge_id, error_code = NULL, decline_code = NULL, error_message = NULL
        FROM given g, before b, clock
        WHERE r.charge_key = g.charge_key AND b.charge_key = r.charge_key
        RETURNING r.charge_key, r.attempt_epoch, b.state AS from_state, r.state),
    {_insert_seen("recovery", "state", "clock.now")},
    done AS (
        SELECT charge_key, attempt_epoch, from_state, state FROM updated
        UNION ALL SELECT charge_key, attempt_epoch, NULL, state FROM inserted),
    {audit("done", "from_state")}
    SELECT charge_key FROM done""")
"""A row of the same epoch says enough by itself: it is polled, or looked up before the next send.
One of an earlier epoch does not know yet that it was recharged."""

RECOVER_UNSETTLED: Final = text(f"""
    WITH {CLOCK},
    before AS (
        SELECT id, state AS from_state FROM billing_records
        WHERE state IN ('reserved', 'sent') AND charge_key > :after_key
        ORDER BY charge_key LIMIT :batch FOR UPDATE),
    moved AS (
        UPDATE billing_records r SET state = 'sent', attempts = GREATEST(attempts, 1), claims = 0,
            first_sent_at = CAST(:since AS timestamptz) - interval '24 hours',
            last_sent_at = clock.now, next_attempt_at = NULL, dispatched_at = NULL,
            updated_at = clock.now, {RELEASE}
        FROM before b, clock WHERE r.id = b.id
        RETURNING r.charge_key, r.attempt_epoch, b.from_state, r.state),
    {audit("moved", "from_state")}
    SELECT charge_key FROM moved""")
"""What was in flight when the restored copy was taken may have been sent any time since."""

RECOVER_TIMES: Final = text(f"""
    WITH {CLOCK}
    UPDATE billing_records SET next_attempt_at = clock.now, updated_at = clock.now,
        settled_at = LEAST(settled_at, clock.now)
    FROM clock
    WHERE state IN ('processing', 'requires_action') AND updated_at > clock.now
    RETURNING charge_key""")
"""An open intent that a clock which was ahead has written is asked about now, not years later."""

START_RECOVERY: Final = text(
    "UPDATE deployment SET recovering_since = CAST(:since AS timestamptz) RETURNING namespace"
)
END_RECOVERY: Final = text("UPDATE deployment SET recovering_since = NULL RETURNING namespace")
RECOVERING: Final = text("SELECT recovering_since FROM deployment")
