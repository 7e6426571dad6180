"""What the ledger does when PostgreSQL cuts the link, holds a lock, or goes away."""

from __future__ import annotations

import psycopg
import pytest
from sqlalchemy import Engine, text

from models.database import check_database, make_engine
from models.errors import ConfigurationError, LedgerUnavailable
from models.ledger import Applied, Ledger, Retry
from models.settings import load_settings
from models.states import State
from tests.support.ledgers import claimed, new_record, outcome, request, reread
from tests.support.services import Services


def end_connections(database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        # Each is gone when this returns.
        ended = connection.execute(
            "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        ).fetchall()
    assert ended
    assert all(gone for (gone,) in ended)


def test_sqlalchemy_6283_an_outcome_is_recorded_though_the_connection_was_ended_meanwhile(
    ledger: Ledger, database_url: str
) -> None:
    claim = claimed(ledger)
    end_connections(database_url)
    assert ledger.record_outcome(claim, outcome(), Retry(0.0)).applied is Applied.APPLIED
    assert reread(ledger, claim).state is State.CHARGED


def test_a_lock_that_somebody_holds_is_waited_for_no_longer_than_the_limit(
    ledger: Ledger, database_url: str
) -> None:
    claim = claimed(ledger)
    with psycopg.connect(database_url) as holder:
        holder.execute("SELECT 1 FROM billing_records FOR UPDATE")
        with pytest.raises(LedgerUnavailable):
            ledger.record_outcome(claim, outcome(), Retry(0.0))
    assert reread(ledger, claim).state is State.SENT


def test_an_open_insert_of_the_same_identity_holds_a_claim_up_but_not_for_long(
    ledger: Ledger, database_url: str
) -> None:
    new = new_record()
    with psycopg.connect(database_url) as holder:
        holder.execute(
            "INSERT INTO billing_records (customer_id, billing_period, charge_key, state) "
            "VALUES (%s, %s, %s, 'voided')",
            (new.event.customer_id, new.event.billing_period, new.charge_key),
        )
        assert ledger.claim_new(new, request(new), None) is None
        holder.rollback()
    assert ledger.claim_new(new, request(new), None) is not None


def test_without_postgres_nothing_is_claimed_and_afterwards_all_goes_on(
    ledger: Ledger, services: Services
) -> None:
    new = new_record()
    services.kill("postgres")
    with pytest.raises(LedgerUnavailable):
        ledger.claim_new(new, request(new), None)
    with pytest.raises(LedgerUnavailable):
        check_database(ledger.engine)
    services.start("postgres")
    assert ledger.claim_new(new, request(new), None) is not None


def test_a_database_that_is_not_migrated_is_refused(engine: Engine) -> None:
    check_database(engine)
    with engine.connect() as connection:
        connection.execute(text("DROP TABLE alembic_version"))
    with pytest.raises(ConfigurationError, match="alembic upgrade head"):
        check_database(engine)


@pytest.mark.parametrize("setting", ["synchronous_commit"])
def test_a_server_that_may_forget_a_commit_is_refused(
    engine: Engine, database_url: str, setting: str
) -> None:
    with engine.connect() as connection:
        name = connection.execute(text("SELECT current_database()")).scalar()
        connection.execute(text(f'ALTER DATABASE "{name}" SET {setting} = off'))
    fresh = make_engine(load_settings({"DATABASE_URL": database_url}))
    with pytest.raises(ConfigurationError, match=setting):
        check_database(fresh)
    fresh.dispose()


@pytest.mark.parametrize("url", ["mysql://host/db", "sqlite:///x.db", "not a url"])
def test_only_postgresql_is_taken(url: str) -> None:
    with pytest.raises(ConfigurationError, match="DATABASE_URL"):
        make_engine(load_settings({"DATABASE_URL": url}))
