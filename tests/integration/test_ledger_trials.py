"""Faults that others have met between a program and its PostgreSQL."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url

from models.database import make_engine
from models.errors import LedgerUnavailable
from models.ledger import Applied, Ledger, Retry
from models.settings import load_settings
from models.states import State
from tests.support.ledgers import event, new_record, outcome, request
from tests.support.proxy import Proxy
from tests.support.services import Services

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def proxy(database_url: str) -> Iterator[Proxy]:
    url = make_url(database_url)
    assert url.host is not None
    assert url.port is not None
    with Proxy(url.host, url.port) as proxy:
        yield proxy


@pytest.fixture
def through_proxy(database_url: str, proxy: Proxy, ledger: Ledger) -> Iterator[Ledger]:
    """A ledger whose connections run through the proxy."""
    url = make_url(database_url).set(port=proxy.port).render_as_string(hide_password=False)
    engine = make_engine(load_settings({"DATABASE_URL": url}))
    yield Ledger(engine, ledger.limits, "test")
    engine.dispose()


def test_sqlalchemy_4762_a_claim_whose_commit_answer_was_lost_is_found_again_by_its_key(
    through_proxy: Ledger, proxy: Proxy, ledger: Ledger
) -> None:
    new = new_record()
    proxy.lose_reply_to = b"INSERT INTO billing_records"
    claim = through_proxy.claim_new(new, request(new), None)
    assert proxy.lost == 1
    assert claim is not None
    record = ledger.read(new.charge_key).record
    assert record is not None
    assert record.lease_token == claim.token
    assert record.attempts == 1


def test_sqlalchemy_4762_an_outcome_whose_commit_answer_was_lost_is_written_once(
    through_proxy: Ledger, proxy: Proxy, ledger: Ledger
) -> None:
    new = new_record()
    claim = through_proxy.claim_new(new, request(new), None)
    assert claim is not None
    proxy.lose_reply_to = b"UPDATE charge_attempts"
    with pytest.raises(LedgerUnavailable):
        through_proxy.record_outcome(claim, outcome(), Retry(0.0))
    assert proxy.lost == 1
    assert through_proxy.record_outcome(claim, outcome(), Retry(0.0)).applied is Applied.FENCED
    record = ledger.read(new.charge_key).record
    assert record is not None
    assert record.state is State.CHARGED
    with ledger.engine.connect() as connection:
        moves = connection.execute(text("SELECT count(*) FROM ledger_events")).scalar()
    assert moves == 2, "sent, charged, and nothing twice"


def test_psycopg_280_behind_a_transaction_pooler_no_statement_is_prepared(
    database_url: str, ledger: Ledger
) -> None:
    """A prepared statement would be missing on the next server connection of the pool."""
    engine = make_engine(
        load_settings({"DATABASE_URL": database_url, "DATABASE_POOLED": "true"}), pool_size=1
    )
    pooled = Ledger(engine, ledger.limits, "test")
    for number in range(20):
        new = new_record(event(f"cust_{number}"))
        claim = pooled.claim_new(new, request(new), None)
        assert claim is not None
        pooled.record_outcome(claim, outcome(), Retry(0.0))
        pooled.read_statuses([new.charge_key])
    with engine.connect() as connection:
        prepared = connection.execute(text("SELECT count(*) FROM pg_prepared_statements")).scalar()
    assert prepared == 0
    engine.dispose()


def test_alembic_633_three_upgrades_at_once_on_an_empty_database(services: Services) -> None:
    url = services.new_empty_database()
    upgrades = [
        subprocess.Popen(
            [sys.executable, "-m", "alembic", "upgrade", "head"],
            cwd=CHECKOUT,
            env={**os.environ, "DATABASE_URL": url},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for _ in range(3)
    ]
    results = [(upgrade.communicate(timeout=60)[1], upgrade.returncode) for upgrade in upgrades]
    assert [code for _, code in results] == [0, 0, 0], results
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT count(*) FROM alembic_version").fetchone() == (1,)
    services.drop_database(url)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "DATABASE_URL is not set"),
        ("mysql://host/db", "DATABASE_URL must name a PostgreSQL database"),
        ("postgresql://nobody:secret-word@127.0.0.1:1/db", "DATABASE_URL: "),
    ],
)
def test_a_migration_that_cannot_start_says_one_clear_line(url: str, says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "alembic", "upgrade", "head"],
        cwd=CHECKOUT,
        env={**os.environ, "DATABASE_URL": url},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"chargebridge: {says}")
    assert len(done.stderr.splitlines()) == 1
    assert "secret-word" not in done.stderr
