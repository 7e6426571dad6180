"""What a downgrade must not take away."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, literal_column, select, table

from models.errors import ConfigurationError


def refuse_rows(connection: Connection, tables: Sequence[str]) -> None:
    """Raise ConfigurationError for the first of these tables that holds anything.

    A charge that the ledger has forgotten is made again, and a budget begins anew.
    """
    for name in tables:
        if connection.execute(
            select(literal_column("1")).select_from(table(name)).limit(1)
        ).first():
            raise ConfigurationError(
                f"DATABASE_URL: the table {name} has rows, and nothing is dropped with its rows"
            )
