"""The statements of the ledger. Each commits by itself and says what it expects to find.

Every write of a record's state carries its audit row in the same statement, so that neither
can exist without the other.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import TextClause, text

from models.records import RECORD_COLUMNS

COLUMNS: Final = ", ".join(RECORD_COLUMNS)
CLOCK: Final = "clock AS (SELECT ledger_now() AS now)"
UNLEASED: Final = "(lease_expires_at IS NULL OR lease_expires_at <= clock.now)"
DUE: Final = "(next_attempt_at IS NULL OR next_attempt_at <= clock.now)"
RELEASE: Final = "lease_token = NULL, lease_expires_at = NULL"
CLEAR_HISTORY: Final = (
    "first_sent_at = NULL, last_sent_at = NULL, attempts = 0, unknowns = 0, claims = 0, "
    "look_up = false"
)


def audit(source: str, from_state: str) -> str:
    return f"""audit AS (
        INSERT INTO ledger_events
            (charge_key, attempt_epoch, from_state, to_state, move, actor, reason, request_id, at)
        SELECT charge_key, attempt_epoch, {from_state}, state, :move, :actor, :reason,
               CAST(:request_id AS text), clock.now
        FROM {source}, clock)"""


_ATTEMPT: Final = """attempt AS (
        INSERT INTO charge_attempts (token, charge_key, attempt_epoch, idempotency_key, endpoint,
            params, api_version, upstream_key_id, started_at)
        SELECT :token, charge_key, attempt_epoch, :idempotency_key, :endpoint,
            CAST(:params AS jsonb), :api_version, :upstream_key_id, clock.now
        FROM moved, clock)"""

READ: Final = text(
    f"SELECT ledger_now() AS now, r.* FROM (SELECT 1) one "
    f"LEFT JOIN (SELECT {COLUMNS} FROM billing_records WHERE charge_key = :charge_key) r ON true"
)

# Asked many times a second for all that a bridge holds; only what it acks is compared by its text.
READ_STATUSES: Final = text("""
    SELECT charge_key, state, fingerprint, billing_run, said->>'event_id' AS event_id,
        said->>'description' AS description, said->>'payment_method' AS payment_method
    FROM (SELECT *, CASE WHEN state NOT IN ('reserved', 'sent') THEN event END AS said
          FROM billing_records WHERE charge_key = ANY(:keys)) found""")


def _insert(state: str, sent_columns: str, sent_values: str, tail: str) -> TextClause:
    return text(f"""
    WITH {CLOCK},
    moved AS (
        INSERT INTO billing_records (customer_id, billing_period, charge_key, fingerprint,
            amount_cents, currency, stripe_customer_id, billing_run, source, event, state,
            payment_method, created_at, updated_at{sent_columns})
        SELECT :customer_id, :billing_period, :charge_key, :fingerprint, :amount_cents, :currency,
            :stripe_customer_id, :billing_run, :source, CAST(:event AS jsonb), '{state}',
            CAST(:payment_method AS text), clock.now, clock.now{sent_values}
        FROM clock
        ON CONFLICT DO NOTHING
        RETURNING {COLUMNS}),
    {audit("moved", "CAST(NULL AS text)")}{tail}
    SELECT {COLUMNS} FROM moved""")


INSERT_SENT: Final = _insert(
    "sent",
    ", lease_token, lease_expires_at, first_sent_at, last_sent_at, attempts, claims",
    ", :token, clock.now + make_interval(secs => :lease_s), clock.now, clock.now, 1, 1",
    f", {_ATTEMPT}",
)
"""The first claim: the row says `sent` before anybody can believe Stripe was not called."""

INSERT_RESERVED: Final = _insert(
    "reserved",
    ", next_attempt_at, deferrals, error_code",
    ", clock.now + make_interval(secs => :retry_s), 1, CAST(:error_code AS text)",
    "",
)
"""Where the preparation could not finish: the event is kept, and tried again."""

CLAIM: Final = text(f"""
    WITH {CLOCK},
    moved AS (
        UPDATE billing_records SET state = 'sent', lease_token = :token,
            lease_expires_at = clock.now + make_interval(secs => :lease_s),
            first_sent_at = COALESCE(first_sent_at, clock.now), last_sent_at = clock.now,
            attempts = attempts + 1, claims = claims + 1, next_attempt_at = NULL,
            payment_method = COALESCE(CAST(:payment_method AS text), payment_method),
            updated_at = clock.now
        FROM clock
        WHERE charge_key = :charge_key AND state = :from_state AND attempt_epoch = :epoch
            AND lease_token IS NOT DISTINCT FROM CAST(:expected_token AS uuid)
            AND {UNLEASED} AND {DUE}
            AND (state = 'reserved'
                 OR first_sent_at > clock.now - make_interval(secs => :resend_window_s))
        RETURNING {COLUMNS}),
    {audit("moved", ":from_state")}, {_ATTEMPT}
    SELECT {COLUMNS} FROM moved""")

LEASE: Final = text(f"""
    WITH {CLOCK}
    UPDATE billing_records SET lease_token = :token, claims = claims + 1,
        lease_expires_at = clock.now + make_interval(secs => :lease_s), updated_at = clock.now
    FROM clock
    WHERE charge_key = :charge_key AND state = 'sent' AND attempt_epoch = :epoch
        AND lease_token IS NOT DISTINCT FROM CAST(:expected_token AS uuid)
        AND {UNLEASED} AND {DUE}
    RETURNING {COLUMNS}""")
"""The right to look a record up: nothing is sent, so nothing is counted as sent."""

_FINISH_ATTEMPT: Final = """attempt AS (
        UPDATE charge_attempts SET finished_at = COALESCE(finished_at, clock.now),
            outcome = :outcome, http_status = CAST(:http_status AS integer),
            stripe_request_id = CAST(:stripe_request_id AS text), replayed = :replayed,
            error_code = CAST(:error_code AS text),
            payment_intent_id = CAST(:payment_intent_id AS text),
            charge_id = CAST(:charge_id AS text)
        FROM clock WHERE token = :token)"""

OBJECTS: Final = (
    "payment_intent_id = COALESCE(CAST(:payment_intent_id AS text), payment_intent_id), "
    "charge_id = COALESCE(CAST(:charge_id AS text), charge_id), "
    "error_code = CAST(:error_code AS text), decline_code = CAST(:decline_code AS text), "
    "error_message = CAST(:error_message AS text), updated_at = clock.now"
)


def _fenced(assignments: str, finish_attempt: str) -> TextClause:
    return text(f"""
    WITH {CLOCK}{finish_attempt},
    moved AS (
        UPDATE billing_records SET {assignments}, {OBJECTS}, {RELEASE}
        FROM clock
        WHERE charge_key = :charge_key AND state = 'sent' AND lease_token = :token
        RETURNING {COLUMNS}),
    {audit("moved", "'sent'")}
    SELECT {COLUMNS} FROM moved""")


_SETTLE: Final = (
    "state = :to_state, settled_at = clock.now, claims = 0, deferrals = 0, "
    "next_attempt_at = clock.now + make_interval(secs => CAST(:poll_s AS double precision))"
)
"""`poll_s` is null but for an intent that is still open: the sweep asks about it again."""

_BACK_TO_RESERVED: Final = (
    f"state = 'reserved', {CLEAR_HISTORY}, deferrals = deferrals + 1, "
    "next_attempt_at = clock.now + make_interval(secs => :retry_s)"
)
_STAY_SENT: Final = (
    "unknowns = unknowns + :unknown, claims = 0, look_up = look_up OR :look_up, "
    "next_attempt_at = GREATEST(clock.now + make_interval(secs => :retry_s), "
    "CASE WHEN unknowns + :unknown >= :max_unknowns OR :prove "
    "THEN last_sent_at + make_interval(secs => :proof_of_absence_s) END)"
)
"""From the last allowed unknown on, the next step waits until absence can be proof."""

RECORD_SETTLED: Final = _fenced(_SETTLE, f", {_FINISH_ATTEMPT}")
RECORD_RESERVED: Final = _fenced(_BACK_TO_RESERVED, f", {_FINISH_ATTEMPT}")
RECORD_UNKNOWN: Final = _fenced(_STAY_SENT, f", {_FINISH_ATTEMPT}")
FOUND_SETTLED: Final = _fenced(_SETTLE, "")
FOUND_ABSENT: Final = _fenced(_BACK_TO_RESERVED, "")
FOUND_NOTHING_YET: Final = _fenced(_STAY_SENT, "")

LATE_TRUTH: Final = text(f"""
    WITH {CLOCK},
    moved AS (
        UPDATE billing_records SET state = :to_state, settled_at = clock.now,
            next_attempt_at = NULL, {OBJECTS}, {RELEASE},
            fingerprint = COALESCE(fingerprint, CAST(:fingerprint AS text)),
            amount_cents = COALESCE(amount_cents, CAST(:amount_cents AS bigint)),
            currency = COALESCE(currency, CAST(:currency AS text)),
            stripe_customer_id = COALESCE(stripe_customer_id, CAST(:stripe_customer_id AS text)),
            billing_run = COALESCE(billing_run, CAST(:billing_run AS text)),
            event = COALESCE(event, CAST(:event AS jsonb))
        FROM clock
        WHERE charge_key = :charge_key AND state = :from_state AND attempt_epoch = :epoch
        RETURNING {COLUMNS}),
    {audit("moved", ":from_state")}
    SELECT {COLUMNS} FROM moved""")

LAST_MOVE: Final = text(
    "SELECT move FROM ledger_events WHERE charge_key = :charge_key ORDER BY id DESC LIMIT 1"
)

ADOPT: Final = text(f"""
    WITH {CLOCK},
    moved AS (
        UPDATE billing_records SET {_SETTLE}, {OBJECTS}, {RELEASE}
        FROM clock
        WHERE charge_key = :charge_key AND state = :from_state AND attempt_epoch = :epoch
            AND lease_token IS NOT DISTINCT FROM CAST(:expected_token AS uuid) AND {UNLEASED}
        RETURNING {COLUMNS}),
    {audit("moved", ":from_state")}
    SELECT {COLUMNS} FROM moved""")

DEFER: Final = text(f"""
    WITH {CLOCK}
    UPDATE billing_records SET deferrals = deferrals + 1, error_code = CAST(:error_code AS text),
        next_attempt_at = clock.now + make_interval(secs => :retry_s), updated_at = clock.now
    FROM clock
    WHERE charge_key = :charge_key AND state = 'reserved' AND attempt_epoch = :epoch
        AND {UNLEASED} AND {DUE}
    RETURNING {COLUMNS}""")

POSTPONE: Final = text(f"""
    WITH {CLOCK}
    UPDATE billing_records SET error_code = CAST(:error_code AS text),
        next_attempt_at = clock.now + make_interval(secs => :retry_s), updated_at = clock.now
    FROM clock
    WHERE charge_key = :charge_key AND state = 'sent' AND attempt_epoch = :epoch
        AND {UNLEASED} AND {DUE}
    RETURNING {COLUMNS}""")

GIVE_UP: Final = text(f"""
    WITH {CLOCK},
    moved AS (
        UPDATE billing_records SET state = 'review', settled_at = clock.now,
            next_attempt_at = NULL, updated_at = clock.now, {RELEASE}
        FROM clock
        WHERE charge_key = :charge_key AND state = :from_state AND attempt_epoch = :epoch
            AND lease_token IS NOT DISTINCT FROM CAST(:expected_token AS uuid) AND {UNLEASED}
        RETURNING {COLUMNS}),
    {audit("moved", ":from_state")}
    SELECT {COLUMNS} FROM moved""")

DISPATCH_DUE: Final = text(f"""
    WITH clock AS MATERIALIZED (SELECT ledger_now() AS now),
    due AS (
        SELECT id FROM billing_records, clock
        WHERE state IN ('reserved', 'sent') AND charge_key > :after_key
            AND {UNLEASED} AND {DUE}
            AND (dispatched_at IS NULL
                 OR dispatched_at <= clock.now - make_interval(secs => :redispatch_after_s))
        ORDER BY charge_key LIMIT :batch
        FOR UPDATE OF billing_records SKIP LOCKED)
    UPDATE billing_records r SET dispatched_at = clock.now
    FROM due, clock WHERE r.id = due.id
    RETURNING r.charge_key""")

STORED_REQUEST: Final = text("""
    SELECT endpoint, params, api_version, upstream_key_id, idempotency_key
    FROM charge_attempts WHERE charge_key = :charge_key AND attempt_epoch = :epoch
    ORDER BY id DESC LIMIT 1""")
"""All attempts of an epoch carry the first one's request; the last one says with which key."""
