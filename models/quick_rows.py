"""The short way to PostgreSQL for a process that runs a few statements very often.

The same engine, URL and session limits; only what SQLAlchemy does around each statement is left
out, which costs more than the statement itself. A kept connection is looked at before it is
used, not pinged: a server that has gone has closed its end.
"""

from __future__ import annotations

import queue
import select
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

import psycopg
from psycopg.rows import dict_row
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from models.database import is_our_mistake, unavailable
from models.errors import LedgerUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import TextClause
    from sqlalchemy.engine import Engine

WAIT_S: Final = 5.0
"""For a free connection."""


class RowTaken(Exception):  # noqa: N818 - says what happened
    """A UNIQUE row is there already; the statement had no effect."""


class QuickRows:
    """Runs statements, each of which commits by itself, on a few kept connections."""

    def __init__(self, engine: Engine, connections: int) -> None:
        self._engine = engine
        self._texts: dict[int, str] = {}
        self._places: queue.LifoQueue[psycopg.Connection[dict[str, Any]] | None] = queue.LifoQueue()
        for _ in range(connections):
            self._places.put(None)

    def __call__(
        self, statement: TextClause, values: Mapping[str, Any]
    ) -> Sequence[dict[str, Any]]:
        """Run one statement and read all it returns.

        Raises RowTaken for a UNIQUE violation, LedgerUnavailable when PostgreSQL did not answer:
        whether a write took effect is then unknown.
        """
        query = self._text(statement)
        with self._connection() as connection:
            try:
                return connection.execute(query.encode(), values).fetchall()
            except psycopg.errors.UniqueViolation:
                raise RowTaken from None
            except psycopg.Error as error:
                if is_our_mistake(error):
                    raise
                raise unavailable(error) from None

    def close(self) -> None:
        """Close the connections that nobody uses now."""
        while not self._places.empty():
            kept = self._places.get_nowait()
            if kept is not None:
                kept.close()

    def _text(self, statement: TextClause) -> str:
        # Statements are module constants: their identity names them for ever.
        known = self._texts.get(id(statement))
        if known is None:
            known = str(statement.compile(dialect=self._engine.dialect))
            self._texts[id(statement)] = known
        return known

    @contextmanager
    def _connection(self) -> Iterator[psycopg.Connection[dict[str, Any]]]:
        try:
            connection = self._places.get(timeout=WAIT_S)
        except queue.Empty:
            raise LedgerUnavailable("the ledger did not answer (no free connection)") from None
        try:
            if connection is None or _has_ended(connection):
                connection = self._connect()
            yield connection
        finally:
            self._places.put(None if connection is None or connection.closed else connection)

    def _connect(self) -> psycopg.Connection[dict[str, Any]]:
        try:
            pooled = self._engine.raw_connection()
        except (psycopg.Error, DBAPIError) as error:
            raise LedgerUnavailable(f"the ledger did not answer ({type(error).__name__})") from None
        except PoolTimeout:
            raise LedgerUnavailable("the ledger did not answer (no free connection)") from None
        connection = cast("psycopg.Connection[dict[str, Any]]", pooled.driver_connection)
        # From here on it is ours alone: the pool forgets it.
        pooled.detach()
        connection.autocommit = True
        connection.row_factory = dict_row
        return connection


def _has_ended(connection: psycopg.Connection[Any]) -> bool:
    """Whether the server has said something while nobody asked: it has only its end to tell."""
    if connection.closed:
        return True
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    if poll.poll(0):
        connection.close()
        return True
    return False
