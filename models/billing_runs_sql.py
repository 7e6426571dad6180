"""The statements of the billing runs. Each commits by itself and carries its audit row."""

from __future__ import annotations

from typing import Final

from sqlalchemy import TextClause, text

COLUMNS: Final = (
    "id, billing_run, currency, expected_total_cents, cap_cents, settled_cents, held_cents, "
    "state, vault_key_encrypted, vault_key_expires_at, created_at, closed_at"
)
UNFINISHED: Final = "'reserved', 'sent', 'processing', 'review'"
"""States of billing records that a run may still have to spend on."""


def _audited(moved: str, more: str = "") -> TextClause:
    return text(f"""
    WITH moved AS ({moved} RETURNING *),
    audit AS (
        INSERT INTO billing_run_events
            (run_id, move, actor, reason, expected_total_cents, cap_cents)
        SELECT id, :move, :actor, CAST(:reason AS text), expected_total_cents, cap_cents
        FROM moved){more}
    SELECT {COLUMNS} FROM moved""")


FIND: Final = text(
    f"SELECT {COLUMNS} FROM billing_runs WHERE billing_run = :billing_run AND currency = :currency"
)
LIST: Final = text(f"""
    SELECT {COLUMNS} FROM billing_runs
    WHERE id > :after_id AND (CAST(:billing_run AS text) IS NULL OR billing_run = :billing_run)
    ORDER BY id LIMIT :limit""")
NEWEST: Final = text(f"SELECT {COLUMNS} FROM billing_runs ORDER BY id DESC LIMIT 1")

OPEN: Final = _audited("""
    INSERT INTO billing_runs (billing_run, currency, expected_total_cents, cap_cents)
    VALUES (:billing_run, :currency, CAST(:expected_total_cents AS bigint), :cap_cents)
    ON CONFLICT DO NOTHING""")

RAISE: Final = _audited("""
    UPDATE billing_runs SET expected_total_cents = :expected_total_cents, cap_cents = :cap_cents,
        updated_at = ledger_now()
    WHERE id = :id AND state <> 'closed' AND cap_cents < :cap_cents""")

REOPEN: Final = _audited("""
    UPDATE billing_runs SET state = 'open', closed_at = NULL, updated_at = ledger_now()
    WHERE id = :id AND state = :from_state""")

REOPEN_ABANDONED: Final = _audited("""
    UPDATE billing_runs r SET state = 'open', updated_at = ledger_now()
    WHERE state = 'closing' AND NOT EXISTS (
        SELECT FROM billing_run_events e
        WHERE e.run_id = r.id AND e.move = 'closing'
            AND e.at > ledger_now() - make_interval(secs => :closing_s))""")

BEGIN_CLOSING: Final = _audited("""
    UPDATE billing_runs SET state = 'closing', updated_at = ledger_now()
    WHERE id = :id AND state IN ('open', 'closing')""")

CLOSE: Final = _audited(f"""
    UPDATE billing_runs r SET state = 'closed', closed_at = ledger_now(), updated_at = ledger_now()
    WHERE id = :id AND state = 'closing' AND held_cents = 0
        AND NOT EXISTS (SELECT FROM vault_holds h
                        WHERE h.run_id = r.id AND h.state IN ('reserved', 'sent', 'unknown'))
        AND NOT EXISTS (SELECT FROM billing_records b
                        WHERE b.billing_run = r.billing_run AND b.currency = r.currency
                            AND b.state IN ({UNFINISHED}))""")
"""Looked at again inside the statement: nothing may have come in since `closing` was written."""

STORE_KEY: Final = _audited(
    """
    UPDATE billing_runs SET vault_key_encrypted = :encrypted,
        vault_key_expires_at = ledger_now() + make_interval(secs => :life_s),
        updated_at = ledger_now()
    WHERE id = :id AND vault_key_encrypted IS NOT DISTINCT FROM CAST(:replaces AS text)""",
    """,
    ended AS (
        UPDATE vault_keys SET expires_at = ledger_now()
        WHERE run_id IN (SELECT id FROM moved) AND expires_at > ledger_now()
            AND CAST(:replaces AS text) IS NOT NULL AND label = :label),
    issued AS (
        INSERT INTO vault_keys (run_id, key_hash, label, endpoints, expires_at)
        SELECT id, :key_hash, :label, :endpoints, vault_key_expires_at FROM moved
        WHERE CAST(:key_hash AS text) IS NOT NULL)""",
)
"""One key a run, however many ask at once. The one that is replaced ends by expiring, never by
revocation: a worker that still has it is told to read again, and blocks nothing."""

REENCRYPT: Final = text("""
    UPDATE billing_runs SET vault_key_encrypted = :encrypted
    WHERE id = :id AND vault_key_encrypted = :before RETURNING id""")

TOTALS: Final = text("""
    SELECT state, count(*) AS records, COALESCE(sum(amount_cents), 0)::bigint AS total_cents
    FROM billing_records WHERE billing_run = :billing_run AND currency = :currency
    GROUP BY state""")

NOT_HELD: Final = text("""
    SELECT COALESCE(sum(amount_cents), 0)::bigint AS total_cents
    FROM billing_records b
    WHERE b.billing_run = :billing_run AND b.currency = :currency
        AND b.state IN ('reserved', 'sent')
        AND NOT EXISTS (SELECT FROM vault_holds h
                        WHERE h.charge_key = b.charge_key AND h.state <> 'released')""")
"""Money that unsettled records will still ask for, beyond what is held for them already."""

OPEN_HOLDS: Final = text("""
    SELECT count(*) AS holds FROM vault_holds
    WHERE run_id = :id AND state IN ('reserved', 'sent', 'unknown')""")
