"""The statements of the holds. Each is one, and commits by itself.

Locks are taken hold first, then budget, but for a new hold, which has nothing to lock yet.
Where two requests race for the same UNIQUE row, one statement fails as a whole, and its budget
with it; it is then tried again and finds what the other one did.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import text

_CLOCK: Final = "clock AS MATERIALIZED (SELECT ledger_now() AS now)"
_HELD: Final = "('reserved', 'sent', 'unknown')"
_WINDOW: Final = "clock.now - make_interval(secs => :resend_window_s)"
_TOO_LATE: Final = "COALESCE(clock.now >= to_timestamp(CAST(:send_before AS float8)), false)"
"""Whether the sender's right to send is over: then somebody else may have settled the charge.

Compared on the ledger's clock, which also counted that right, so that no host's clock matters.
"""
_NONE_OPEN: Final = "cardinality(others) = 0"

CHECK_KEY: Final = text(
    "SELECT :rule = ANY(endpoints) AS permitted FROM vault_keys WHERE key_hash = :key_hash"
)

TAKE: Final = text(f"""
    WITH {_CLOCK},
    k AS MATERIALIZED (
        SELECT k.run_id, :rule = ANY(k.endpoints) AS permitted, k.revoked_at IS NOT NULL AS revoked,
            k.expires_at <= clock.now AS expired, r.state AS run_state,
            r.billing_run = :billing_run AND r.currency = :currency AS run_matches,
            {_TOO_LATE} AS too_late,
            r.cap_cents - r.settled_cents - r.held_cents AS free_cents
        FROM vault_keys k JOIN billing_runs r ON r.id = k.run_id, clock
        WHERE k.key_hash = :key_hash),
    h AS MATERIALIZED (
        SELECT id AS hold_id, state AS hold_state,
            run_id = (SELECT run_id FROM k) AND charge_key = :charge_key
                AND attempt_epoch = :attempt_epoch AND endpoint = :endpoint
                AND amount_cents = :amount_cents AS same_request,
            first_sent_at IS NULL OR first_sent_at > {_WINDOW} AS in_window,
            first_sent_at IS NULL OR upstream_key_id = :upstream_key_id AS same_upstream
        FROM vault_holds, clock WHERE idempotency_key = :idempotency_key),
    rival AS MATERIALIZED (
        SELECT FROM vault_holds
        WHERE charge_key = :charge_key AND state <> 'released'
            AND idempotency_key <> :idempotency_key),
    fresh AS (
        SELECT run_id FROM k
        WHERE permitted AND run_matches AND NOT revoked AND NOT expired AND NOT too_late
            AND NOT EXISTS (SELECT FROM h) AND NOT EXISTS (SELECT FROM rival)),
    again AS MATERIALIZED (
        SELECT v.id, v.run_id FROM vault_holds v, h, k
        WHERE v.id = h.hold_id AND v.state = 'released' AND k.permitted AND k.run_matches
            AND NOT k.too_late AND h.same_request AND h.in_window AND h.same_upstream
            AND NOT EXISTS (SELECT FROM rival)
        FOR UPDATE OF v),
    budget AS (
        UPDATE billing_runs r
        SET held_cents = r.held_cents + :amount_cents, updated_at = clock.now
        FROM (SELECT run_id, true AS is_new FROM fresh
              UNION ALL SELECT run_id, false FROM again) wish, clock
        WHERE r.id = wish.run_id AND (r.state = 'open' OR NOT wish.is_new)
            AND r.settled_cents + r.held_cents + :amount_cents <= r.cap_cents
        RETURNING r.id AS run_id, wish.is_new),
    made AS (
        INSERT INTO vault_holds (run_id, idempotency_key, charge_key, attempt_epoch, endpoint,
            amount_cents, state, created_at, updated_at)
        SELECT run_id, :idempotency_key, :charge_key, :attempt_epoch, :endpoint, :amount_cents,
            'reserved', clock.now, clock.now
        FROM budget, clock WHERE is_new
        RETURNING id),
    retaken AS (
        UPDATE vault_holds v SET state = 'reserved', outcome = NULL, updated_at = clock.now
        FROM budget, again, clock WHERE NOT budget.is_new AND v.id = again.id
        RETURNING v.id)
    SELECT COALESCE(made.id, retaken.id) AS taken_id, k.permitted, k.revoked, k.expired,
        k.run_state, k.run_matches, k.too_late, k.free_cents, h.*,
        EXISTS (SELECT FROM rival) AS has_rival,
        EXISTS (SELECT FROM billing_runs
                WHERE billing_run = :billing_run AND currency = :currency) AS run_exists
    FROM clock LEFT JOIN k ON true LEFT JOIN h ON true
        LEFT JOIN made ON true LEFT JOIN retaken ON true""")
"""Cap, expiry, revocation, run state and both UNIQUE rows, in one atomic statement.

Nothing to take for a replay of a hold that still holds. What it found is returned beside what
it did, so that a refusal can be named.
"""


def _still_open(hold: str, what: str) -> str:
    """Tokens (or ends) of the forwards that may still be running, but for the one that ends.

    One that died with its vault is over when the longest forward there can be would be.
    """
    return f"""ARRAY(
            SELECT {what} FROM unnest({hold}.open_forwards, {hold}.open_untils) f(token, until)
            WHERE until > clock.now AND token IS DISTINCT FROM CAST(:token AS uuid)
            ORDER BY until)"""


BEGIN: Final = text(f"""
    WITH {_CLOCK},
    old AS MATERIALIZED (
        SELECT id, state, first_sent_at FROM vault_holds WHERE id = :id FOR UPDATE)
    UPDATE vault_holds v SET
        state = CASE WHEN v.state = 'settled' THEN v.state ELSE 'sent' END,
        first_sent_at = COALESCE(v.first_sent_at, clock.now), last_sent_at = clock.now,
        upstream_key_id = :upstream_key_id, forwards = v.forwards + 1,
        open_forwards = {_still_open("v", "token")} || CAST(:token AS uuid),
        open_untils = {_still_open("v", "until")}
            || (clock.now + make_interval(secs => :open_s)),
        updated_at = clock.now
    FROM old, clock
    WHERE v.id = old.id AND v.state <> 'released' AND NOT {_TOO_LATE}
        AND (v.first_sent_at IS NULL
             OR (v.first_sent_at > {_WINDOW} AND v.upstream_key_id = :upstream_key_id))
    RETURNING v.id, old.state AS before, old.first_sent_at IS NULL AS is_first, v.forwards""")
"""Committed before the first byte goes out: from here on the request may have reached Stripe."""


def _old(which: str) -> str:
    """The hold that is meant, locked, without the forward that ends."""
    return f"""old AS MATERIALIZED (
        SELECT id, run_id, state, amount_cents, last_sent_at, payment_intent_id, charge_id,
            forwards AS forwards_now, {_still_open("h", "token")} AS others,
            {_still_open("h", "until")} AS other_untils
        FROM vault_holds h, clock WHERE {which} FOR UPDATE OF h)"""


_SINCE: Final = """(CAST(:only_forward AS integer) IS NOT NULL
                AND forwards_now <> CAST(:only_forward AS integer))"""
"""Whether another forward of the key has begun since the one that ends."""
_MOVED: Final = f"""moved AS (
        UPDATE vault_holds v SET state = judged.next, open_forwards = judged.others,
            open_untils = judged.other_untils,
            late = v.late OR (judged.before = 'released' AND judged.next = 'settled'),
            outcome = CASE WHEN judged.before IN ('settled', 'released')
                    AND judged.next = judged.before THEN v.outcome
                ELSE CAST(:outcome AS text) END,
            payment_intent_id = COALESCE(CAST(:payment_intent_id AS text), v.payment_intent_id),
            charge_id = COALESCE(CAST(:charge_id AS text), v.charge_id),
            first_sent_at = CASE WHEN judged.next = 'released' AND :forget AND NOT {_SINCE}
                THEN NULL ELSE v.first_sent_at END,
            updated_at = clock.now
        FROM judged, clock WHERE v.id = judged.id
        RETURNING v.id),
    budget AS (
        UPDATE billing_runs r SET held_cents = r.held_cents - sums.freed_cents,
            settled_cents = r.settled_cents + sums.settled_cents, updated_at = clock.now
        FROM clock, (
            SELECT judged.run_id,
                COALESCE(sum(judged.amount_cents) FILTER (
                    WHERE judged.before IN ('reserved', 'sent', 'unknown')), 0) AS freed_cents,
                COALESCE(sum(judged.amount_cents) FILTER (
                    WHERE judged.next = 'settled'), 0) AS settled_cents
            FROM judged JOIN moved ON moved.id = judged.id
            WHERE judged.next IN ('settled', 'released') AND judged.before <> judged.next
            GROUP BY judged.run_id) sums
        WHERE r.id = sums.run_id)"""

_OTHER_OBJECT: Final = """:verdict = 'settled' AND old.state = 'settled' AND (
            (old.payment_intent_id IS NOT NULL
                AND old.payment_intent_id <> CAST(:payment_intent_id AS text))
            OR (old.payment_intent_id IS NULL AND old.charge_id <> CAST(:charge_id AS text))
        ) IS TRUE AS other_object"""
"""A second success with another object: two charges for one key."""

END: Final = text(f"""
    WITH {_CLOCK},
    {_old("id = :id")},
    judged AS MATERIALIZED (
        SELECT old.*, old.state AS before, {_OTHER_OBJECT},
            CASE WHEN :verdict = 'settled' OR old.state = 'settled' THEN 'settled'
                WHEN old.state = 'released' THEN 'released'
                WHEN :verdict = 'open' THEN 'sent'
                WHEN :verdict <> 'failed' OR (NOT :certain AND {_SINCE}) THEN 'unknown'
                WHEN {_NONE_OPEN} THEN 'released'
                ELSE 'sent' END AS next
        FROM old, clock),
    {_MOVED}
    SELECT id, before, next, other_object FROM judged""")
"""What one forward came to. A failure releases only when no other forward of the key is open;
one that is definite for a first send alone only when no other forward has begun since."""

RESOLVE: Final = text(f"""
    WITH {_CLOCK},
    {_old("idempotency_key = :idempotency_key")},
    seen AS (
        SELECT old.*, old.state AS before, {_OTHER_OBJECT},
            NOT {_NONE_OPEN} AS is_open,
            COALESCE(old.last_sent_at > CAST(:seen_at AS timestamptz), false) AS is_newer
        FROM old, clock),
    judged AS MATERIALIZED (
        SELECT *, CASE WHEN :verdict = 'settled' THEN 'settled' ELSE 'released' END AS next
        FROM seen
        WHERE :verdict = 'settled' OR (before <> 'settled' AND NOT is_open AND NOT is_newer)),
    {_MOVED}
    SELECT seen.is_open, seen.is_newer, seen.before AS was, judged.id, judged.before, judged.next,
        judged.other_object
    FROM seen LEFT JOIN judged ON true""")
"""What somebody who asked Stripe says. A failure or an absence needs a hold that is neither
settled nor under way, and that was not sent again since they asked: who slept in between knows
nothing of that."""

_OF_OBJECT: Final = """charge_key = :charge_key AND (
            payment_intent_id = CAST(:payment_intent_id AS text)
            OR (payment_intent_id IS NULL AND charge_id = CAST(:charge_id AS text))
            OR (payment_intent_id IS NULL AND charge_id IS NULL
                AND attempt_epoch = CAST(:attempt_epoch AS integer)))"""

OBSERVE: Final = text(f"""
    WITH {_CLOCK},
    {_old(_OF_OBJECT)},
    judged AS MATERIALIZED (
        SELECT old.*, old.state AS before, {_OTHER_OBJECT},
            CASE WHEN :verdict = 'settled' THEN 'settled' ELSE 'released' END AS next
        FROM old, clock
        WHERE :verdict = 'settled' OR (old.state IN {_HELD} AND {_NONE_OPEN}
            AND (:verdict = 'canceled'
                 OR old.last_sent_at
                     <= clock.now - make_interval(secs => :proof_of_absence_s)))),
    {_MOVED}
    SELECT id, before, next, other_object FROM judged""")
"""What a cancel or a read that passed by shows of a hold's own object. A failure in passing may
be the status of a request that still runs: it counts only once none can."""

LIST: Final = text("""
    SELECT h.id, r.billing_run, r.currency, h.idempotency_key, h.charge_key, h.attempt_epoch,
        h.endpoint, h.amount_cents, h.state, h.outcome, h.payment_intent_id, h.charge_id,
        h.first_sent_at, h.last_sent_at, h.forwards, h.late
    FROM vault_holds h JOIN billing_runs r ON r.id = h.run_id
    WHERE h.id > :after_id AND (CAST(:billing_run AS text) IS NULL OR r.billing_run = :billing_run)
        AND (CAST(:state AS text) IS NULL OR h.state = :state)
    ORDER BY h.id LIMIT :limit""")
