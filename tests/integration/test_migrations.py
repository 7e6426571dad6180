"""The migrations make what the code believes to be there."""

from __future__ import annotations

import os
import subprocess
import sys

from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, text

from models.billing_runs import BillingRuns
from models.database import REQUIRED_REVISION
from models.ledger import Ledger
from models.tables import metadata
from sandbox.binaries import CHECKOUT
from tests.support.ledgers import claimed
from tests.support.waiting import stays, wait_until

MIGRATION_LOCK = 0x63_62_6D_67
SHORT_LIMITS = "-c lock_timeout=1s -c statement_timeout=1s"
SANDBOX_TABLES = {"sandbox_clock"}
"""What the embedded stack adds beside the product's own tables."""


def test_the_migrated_database_is_the_one_in_the_tables_module(engine: Engine) -> None:
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_server_default": False})
        differences = [
            difference
            for difference in compare_metadata(context, metadata)
            if not (difference[0] == "remove_table" and difference[1].name in SANDBOX_TABLES)
        ]
    assert differences == []


def test_nothing_is_dropped_with_its_rows(engine: Engine, ledger: Ledger) -> None:
    """A forgotten charge would be made again, and a budget begin anew."""
    BillingRuns(engine, "test").open("run", "usd", 1000)
    claimed(ledger)
    for target, table in (("0001", "billing_run_events"), ("base", "billing_run_events")):
        done = alembic(engine, "downgrade", target)
        assert done.returncode == 1
        line = done.stderr.strip().splitlines()[-1]
        assert line.startswith(f"chargebridge: DATABASE_URL: the table {table} has rows")
    with engine.connect() as connection:
        connection.execute(text("DELETE FROM billing_run_events"))
        connection.execute(text("DELETE FROM billing_runs"))
    assert alembic(engine, "downgrade", "0001").returncode == 0
    done = alembic(engine, "downgrade", "base")
    assert "the table ledger_events has rows" in done.stderr
    assert alembic(engine, "upgrade", "head").returncode == 0


def test_an_upgrade_waits_for_another_whatever_limits_its_role_has(engine: Engine) -> None:
    with engine.connect() as other:
        # Ours are ended when they do nothing for some seconds, and this one has to wait.
        other.execute(text("SET idle_in_transaction_session_timeout = 0"))
        other.execute(text("BEGIN"))
        other.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": MIGRATION_LOCK})
        with start_alembic(engine, "upgrade", "head", options=SHORT_LIMITS) as waiting:
            wait_until(lambda: waits_for_the_lock(engine), 60.0, "it has come to the lock")
            stays(lambda: waiting.poll() is None, 2.0, "it waits")
            other.execute(text("ROLLBACK"))
            _, err = waiting.communicate(timeout=60)
        assert waiting.returncode == 0, err


def waits_for_the_lock(engine: Engine) -> bool:
    with engine.connect() as connection:
        waiting = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        return connection.execute(text(waiting)).first() is not None


def start_alembic(engine: Engine, *arguments: str, options: str = "") -> subprocess.Popen[str]:
    url = engine.url.set(drivername="postgresql")
    if options:
        url = url.update_query_dict({"options": options})
    shown = url.render_as_string(hide_password=False)
    return subprocess.Popen(
        [sys.executable, "-m", "alembic", *arguments],
        cwd=CHECKOUT,
        env={**os.environ, "DATABASE_URL": shown},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def alembic(engine: Engine, *arguments: str) -> subprocess.CompletedProcess[str]:
    with start_alembic(engine, *arguments) as started:
        out, err = started.communicate(timeout=60)
    return subprocess.CompletedProcess(arguments, started.returncode, out, err)


def test_there_is_one_head_and_the_code_asks_for_no_later_one() -> None:
    scripts = ScriptDirectory.from_config(Config(CHECKOUT / "alembic.ini"))
    (head,) = scripts.get_heads()
    assert head >= REQUIRED_REVISION
