"""Runs the migrations of DATABASE_URL, one process at a time."""

from __future__ import annotations

import sys
from typing import Final

from alembic import context
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.pool import NullPool

from models.database import CONNECT_TIMEOUT_S, MISSING_PRIVILEGE, database_url
from models.errors import ConfigurationError
from models.settings import load_settings
from models.tables import metadata

MIGRATION_LOCK: Final = 0x63_62_6D_67
"""Advisory lock: several upgrades at once wait for each other, then find nothing to do."""
LOCK_TIMEOUT_S: Final = 30
"""A migration that cannot get its table lock gives up instead of blocking every worker."""


def run() -> None:
    """Upgrade or downgrade in one transaction under the advisory lock."""
    settings = load_settings()
    settings.require("database_url")
    engine = create_engine(
        database_url(settings.database_url),
        poolclass=NullPool,
        connect_args={
            "connect_timeout": CONNECT_TIMEOUT_S,
            "target_session_attrs": "read-write",
            "prepare_threshold": None,
        },
    )
    with engine.connect() as connection:
        # The role may have limits of its own, which are not meant for this: waiting for another
        # upgrade, or building an index, takes as long as it takes.
        connection.execute(text("SET LOCAL lock_timeout = 0"))
        connection.execute(text("SET LOCAL statement_timeout = 0"))
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": MIGRATION_LOCK})
        connection.execute(text(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'"))
        context.configure(connection=connection, target_metadata=metadata)
        context.run_migrations()
        connection.commit()


try:
    run()
except ConfigurationError as error:
    sys.exit(f"chargebridge: {error}")
except DBAPIError as error:
    missing = getattr(error.orig, "sqlstate", None) == MISSING_PRIVILEGE
    if not missing and not isinstance(error, OperationalError):
        raise
    sys.exit(f"chargebridge: DATABASE_URL: {str(error.orig).strip().splitlines()[0]}")
