"""One way to reach PostgreSQL: engine, session limits, and what a start insists on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg.conninfo import make_conninfo
from sqlalchemy import TextClause, create_engine, text
from sqlalchemy.engine import URL, Connection, Engine, RowMapping, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import QueuePool

from models.errors import ConfigurationError, LedgerUnavailable
from models.urls import check_database_url

if TYPE_CHECKING:
    from models.settings import Settings

CONNECT_TIMEOUT_S: Final = 5
LOCK_TIMEOUT_S: Final = 2
"""A second insert of the same identity waits for an open one no longer than this."""
STATEMENT_TIMEOUT_S: Final = 10
IDLE_IN_TRANSACTION_TIMEOUT_S: Final = 5
"""A process frozen inside a transaction must not freeze the others."""
KEEPALIVES_IDLE_S: Final = 5
USER_TIMEOUT_S: Final = 15
"""Unanswered bytes on a connection: after this the server is gone."""
MISSING_PRIVILEGE: Final = "42501"
"""PostgreSQL's code for a statement that its user may not run; it had no effect."""
REQUIRED_REVISION: Final = "0002"
"""The oldest schema that this code can work with; a newer one is expected to fit."""


def database_url(url: str) -> URL:
    """Read a libpq-style or SQLAlchemy URL; the driver is always psycopg 3.

    Raises ConfigurationError for anything that is not PostgreSQL, and for options behind the
    `?` that its library does not know.
    """
    check_database_url("DATABASE_URL", url)
    try:
        parsed = make_url(url).set(drivername="postgresql+psycopg")
        arguments, options = parsed.get_dialect()().create_connect_args(parsed)
        make_conninfo(*arguments, **options)
    except (ArgumentError, ValueError, psycopg.Error):
        # Not repeated here: it may hold a password.
        raise ConfigurationError(
            "DATABASE_URL: what follows the ? is not an option of PostgreSQL's library"
        ) from None
    return parsed


def make_engine(settings: Settings, *, pool_size: int = 2, name: str = "chargebridge") -> Engine:
    """An engine whose every statement commits by itself, with the session limits set.

    Build it in the process that uses it, never before a fork: two processes on one
    connection read each other's rows.
    """
    settings.require("database_url")
    connect_args: dict[str, object] = {
        "connect_timeout": CONNECT_TIMEOUT_S,
        "application_name": name,
        "target_session_attrs": "read-write",
        "keepalives_idle": KEEPALIVES_IDLE_S,
        "tcp_user_timeout": USER_TIMEOUT_S * 1000,
    }
    if settings.database_pooled:
        # A transaction pooler gives each transaction another server connection.
        connect_args["prepare_threshold"] = None
    else:
        connect_args["options"] = (
            f"-c lock_timeout={LOCK_TIMEOUT_S * 1000}"
            f" -c statement_timeout={STATEMENT_TIMEOUT_S * 1000}"
            f" -c idle_in_transaction_session_timeout={IDLE_IN_TRANSACTION_TIMEOUT_S * 1000}"
        )
    return create_engine(
        database_url(settings.database_url),
        poolclass=QueuePool,
        pool_size=pool_size,
        max_overflow=2,
        pool_timeout=CONNECT_TIMEOUT_S,
        pool_pre_ping=True,
        isolation_level="AUTOCOMMIT",
        connect_args=connect_args,
        hide_parameters=True,
    )


def rows(engine: Engine, statement: TextClause, values: Mapping[str, Any]) -> Sequence[RowMapping]:
    """Run one statement, which commits by itself, and read all it returns.

    Raises LedgerUnavailable when PostgreSQL did not answer: whether a write took effect is
    then unknown. A broken statement or value is a bug, and is raised as it is.
    """
    try:
        with engine.connect() as connection:
            return connection.execute(statement, values).mappings().all()
    except DBAPIError as error:
        if is_our_mistake(error.orig):
            raise
        raise unavailable(error.orig) from None
    except PoolTimeout:
        raise LedgerUnavailable("the ledger did not answer (no free connection)") from None


@contextmanager
def transaction(engine: Engine) -> Iterator[Connection]:
    """Several statements that take effect together or not at all. Never around a call out.

    Raises LedgerUnavailable like `rows`; any error rolls everything back.
    """
    try:
        with engine.execution_options(isolation_level="READ COMMITTED").begin() as connection:
            yield connection
    except DBAPIError as error:
        if is_our_mistake(error.orig):
            raise
        raise unavailable(error.orig) from None
    except PoolTimeout:
        raise LedgerUnavailable("the ledger did not answer (no free connection)") from None


def is_our_mistake(error: BaseException | None) -> bool:
    """Whether the driver's error is a bug, which is to be seen at once, not waited for."""
    state = _state(error)
    return state[:2] in ("22", "23", "42") and state != MISSING_PRIVILEGE


def unavailable(error: BaseException | None) -> LedgerUnavailable:
    """The driver's error as one line without any value of the statement."""
    if _state(error) == MISSING_PRIVILEGE:
        # Grants are the server's matter, not a bug: they can come back as they went.
        return LedgerUnavailable(f"DATABASE_URL: {str(error).strip().splitlines()[0]}")
    return LedgerUnavailable(f"the ledger did not answer ({_state(error) or type(error).__name__})")


def _state(error: BaseException | None) -> str:
    return str(getattr(error, "sqlstate", None) or "")


def check_database(engine: Engine) -> None:
    """Refuse a database that cannot keep a promise.

    Raises ConfigurationError for one that is not migrated or may lose a commit in a crash,
    LedgerUnavailable for one that does not answer.
    """
    try:
        with engine.connect() as connection:
            _check_durability(connection)
            _check_revision(connection)
    except OperationalError as error:
        raise LedgerUnavailable(f"DATABASE_URL: {_first_line(error)}") from None
    except DBAPIError as error:
        # A role without rights, say: nothing that waiting could mend.
        raise ConfigurationError(f"DATABASE_URL: {_first_line(error)}") from None
    except PoolTimeout:
        raise LedgerUnavailable("DATABASE_URL: no free connection") from None


def _check_durability(connection: Connection) -> None:
    fsync, synchronous = connection.execute(
        text("SELECT current_setting('fsync'), current_setting('synchronous_commit')")
    ).one()
    if fsync == "off":
        raise ConfigurationError("DATABASE_URL: the server runs with fsync=off")
    if synchronous == "off":
        raise ConfigurationError("DATABASE_URL: the server runs with synchronous_commit=off")


def _check_revision(connection: Connection) -> None:
    if connection.execute(text("SELECT to_regclass('alembic_version')")).scalar() is None:
        raise ConfigurationError("DATABASE_URL: not migrated; run `alembic upgrade head`")
    revision = connection.execute(text("SELECT max(version_num) FROM alembic_version")).scalar()
    if revision is None or str(revision) < REQUIRED_REVISION:
        raise ConfigurationError(
            f"DATABASE_URL: schema {revision or 'empty'} is older than {REQUIRED_REVISION}; "
            "run `alembic upgrade head`"
        )


def _first_line(error: DBAPIError) -> str:
    return str(error.orig).strip().splitlines()[0] if error.orig else "not reachable"
