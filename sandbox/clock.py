"""A ledger clock that can be moved: the sandbox's version of `ledger_now()`.

Production's function is the wall clock. Here an offset from a one-row table is added, so that a
day can pass between two tries of a charge.
"""

from __future__ import annotations

import psycopg

INSTALL = (
    """
    CREATE TABLE IF NOT EXISTS sandbox_clock (
        single boolean PRIMARY KEY DEFAULT true CHECK (single),
        offset_s double precision NOT NULL DEFAULT 0
    )
    """,
    "INSERT INTO sandbox_clock DEFAULT VALUES ON CONFLICT DO NOTHING",
    """
    CREATE OR REPLACE FUNCTION ledger_now() RETURNS timestamptz LANGUAGE sql VOLATILE AS
    'SELECT clock_timestamp() + make_interval(secs => (SELECT offset_s FROM sandbox_clock))'
    """,
)


def install(database_url: str) -> None:
    """Replaces the function in this database; an offset that is there stays."""
    with psycopg.connect(database_url) as link:
        for statement in INSTALL:
            link.execute(statement)


def advance(database_url: str, seconds: float) -> None:
    """Moves the ledger's clock forward; not at all where PostgreSQL has no such time."""
    with psycopg.connect(database_url) as link:
        link.execute("UPDATE sandbox_clock SET offset_s = offset_s + %s", [seconds])
        link.execute("SELECT ledger_now()")
