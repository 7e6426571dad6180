"""The plans of the hot statements on a large ledger, and a sweep over ten thousand due records.

    python -m bench.query_plans [--rows N]

Exit 1 when a statement reads billing records otherwise than through an index.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from sqlalchemy import Connection, Engine, TextClause, text

from models import action_sql, ledger_reads, ledger_sql
from models.database import make_engine
from models.ledger import Ledger
from models.ledger_reads import LedgerReads
from models.settings import load_settings
from tasks.sweep import Sweep
from tests.support.services import running_services

ROWS = 1_000_000
UNSETTLED = 10_000
OPEN = 1_000
WATCHED = 200
"""Keys that a bridge asks about at once."""
FILL = """
INSERT INTO billing_records (customer_id, billing_period, charge_key, fingerprint, amount_cents,
    currency, stripe_customer_id, billing_run, state, first_sent_at, last_sent_at, attempts,
    next_attempt_at, source, settled_at)
SELECT 'cust_' || n / 12, 'period-' || n % 12, md5(n::text), md5('f' || n), 2500, 'usd',
    'cus_' || n / 12, 'period-' || n % 12, s.state,
    CASE WHEN s.state <> 'reserved' THEN now() - interval '1 hour' END,
    CASE WHEN s.state <> 'reserved' THEN now() - interval '1 hour' END,
    CASE WHEN s.state <> 'reserved' THEN 1 ELSE 0 END,
    CASE WHEN s.state IN ('sent', 'reserved', 'processing', 'requires_action')
        THEN now() - interval '1 minute' END,
    'nsq', CASE WHEN s.state NOT IN ('sent', 'reserved') THEN now() END
FROM generate_series(1, :rows) n, LATERAL (SELECT CASE
    WHEN n % :every_unsettled = 0 THEN (CASE WHEN n % 2 = 0 THEN 'sent' ELSE 'reserved' END)
    WHEN n % :every_open = 1 THEN 'processing' WHEN n % 50 = 2 THEN 'card_declined'
    ELSE 'charged' END AS state) s"""
KEY = "SELECT charge_key FROM billing_records WHERE state = 'sent' ORDER BY charge_key LIMIT 1"
LIST = {"state": None, "billing_period": None, "billing_run": None, "customer_id": None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS)
    rows = parser.parse_args().rows
    with running_services() as services:
        settings = load_settings({"DATABASE_URL": services.new_database()})
        engine = make_engine(settings, pool_size=2, name="bench")
        fill(engine, rows)
        scans = print_plans(engine)
        sweep(engine, Ledger(engine, settings.limits, "bench"))
        engine.dispose()
    print(f"statements without an index: {', '.join(scans) or 'none'}")
    return 1 if scans else 0


def fill(engine: Engine, rows: int) -> None:
    begun = time.monotonic()
    every = {"every_unsettled": max(1, rows // UNSETTLED), "every_open": max(2, rows // OPEN)}
    with engine.connect() as connection:
        connection.execute(text("SET statement_timeout = 0"))
        connection.execute(text(FILL), {"rows": rows, **every})
        connection.execute(text("VACUUM ANALYZE billing_records"))
        connection.execute(text("RESET statement_timeout"))
    print(f"{rows} billing records, {UNSETTLED} unsettled: {time.monotonic() - begun:.1f} s\n")


def statements(key: str, watched: list[str]) -> dict[str, tuple[TextClause, Mapping[str, Any]]]:
    """What workers, bridges, sweep and operators ask, with values as they would have them."""
    audit = {"move": "claim", "actor": "bench", "reason": None, "request_id": None}
    claim = {
        "charge_key": key,
        "token": uuid4(),
        "lease_s": 45,
        "from_state": "sent",
        "epoch": 0,
        "expected_token": None,
        "resend_window_s": 72_000,
        "payment_method": None,
        "endpoint": "payment_intents",
        "params": "{}",
        "api_version": "x",
        "upstream_key_id": "x",
        "idempotency_key": key,
        **audit,
    }
    identity = {"customer_id": "cust_7", "billing_period": "period-3"}
    page = {"after_key": "", "limit": 50}
    return {
        "read (worker)": (ledger_sql.READ, {"charge_key": key}),
        "claim": (ledger_sql.CLAIM, claim),
        "watcher": (ledger_sql.READ_STATUSES, {"keys": watched}),
        "sweep": (
            ledger_sql.DISPATCH_DUE,
            {"after_key": "", "batch": 100, "redispatch_after_s": 30},
        ),
        "sweep, further on": (
            ledger_sql.DISPATCH_DUE,
            {"after_key": "8", "batch": 100, "redispatch_after_s": 30},
        ),
        "polls": (action_sql.TAKE_POLLS, {"batch": 20, "hold_s": 60}),
        "oldest unsettled": (ledger_reads.OLDEST_UNSETTLED, {}),
        "show": (action_sql.BY_IDENTITY, identity),
        "list": (ledger_reads.LIST, {**page, **LIST}),
        "list by state": (ledger_reads.LIST, {**page, **LIST, "state": "card_declined"}),
        "list by period": (
            ledger_reads.LIST,
            {**page, **LIST, "billing_period": "period-3"},
        ),
        "list by state and period": (
            ledger_reads.LIST,
            {**page, **LIST, "state": "card_declined", "billing_period": "period-3"},
        ),
        "list by run": (ledger_reads.LIST, {**page, **LIST, "billing_run": "period-3"}),
        "list by customer": (ledger_reads.LIST, {**page, **LIST, "customer_id": "cust_7"}),
    }


def print_plans(engine: Engine) -> list[str]:
    """Print every plan; the names of the statements that scan the whole table."""
    scans = []
    with engine.execution_options(isolation_level="READ COMMITTED").connect() as connection:
        key = str(connection.execute(text(KEY)).scalar())
        keys = "SELECT charge_key FROM billing_records TABLESAMPLE SYSTEM (1) LIMIT :count"
        watched = list(connection.execute(text(keys), {"count": WATCHED}).scalars())
        for name, (statement, values) in statements(key, watched).items():
            plan = explain(connection, statement, values)
            print(f"== {name}")
            print("\n".join(f"   {line}" for line in plan))
            if any("Seq Scan on billing_records" in line for line in plan):
                scans.append(name)
            connection.rollback()
    return scans


def explain(connection: Connection, statement: TextClause, values: Mapping[str, Any]) -> list[str]:
    """The plan as it ran; nothing of it is kept."""
    asked = text(f"EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) {statement.text}")
    return [str(row[0]) for row in connection.execute(asked, values)]


def sweep(engine: Engine, ledger: Ledger) -> None:
    """Drive all that is due, as the sweep does, and say what it took."""
    published = 0

    def publish(_: str) -> None:
        nonlocal published
        published += 1

    work = Sweep(ledger, LedgerReads(engine), publish)
    work.run_once("")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.monotonic()
    while work.run():
        pass
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(
        f"\nsweep: {published} published in {time.monotonic() - begun:.1f} s, "
        f"{grown_kib} KiB more memory"
    )


if __name__ == "__main__":
    sys.exit(main())
