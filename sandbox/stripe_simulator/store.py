"""The simulator's whole state in one SQLite file.

Nothing is visible to a client before `commit`, so a process killed at any moment leaves either all
of an exchange or nothing of it. Intents whose create was still running are dropped on opening: a
killed server has no request in flight.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from sandbox.stripe_simulator.messages import Json, encode
from sandbox.stripe_simulator.rows import LoggedRequest, SavedAnswer, Stored

Kind = Literal["intents", "charges"]

#: Rows read at a time where a listing has no end.
ROWS_AT_A_TIME = 500

_OBJECTS = """
CREATE TABLE IF NOT EXISTS {kind} (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, customer TEXT, intent TEXT,
    created INTEGER NOT NULL, running INTEGER NOT NULL, taken INTEGER NOT NULL,
    idempotency_key TEXT, body TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS {kind}_customer ON {kind} (customer, created, seq);
CREATE INDEX IF NOT EXISTS {kind}_created ON {kind} (created, seq);
CREATE INDEX IF NOT EXISTS {kind}_intent ON {kind} (intent) WHERE intent IS NOT NULL;
"""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (
    key TEXT PRIMARY KEY, fingerprint BLOB NOT NULL, created REAL NOT NULL,
    status INTEGER NOT NULL, body TEXT NOT NULL, request_id TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS keys_created ON keys (created);
CREATE TABLE IF NOT EXISTS customers (id TEXT PRIMARY KEY, deleted INTEGER NOT NULL, body TEXT);
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS requests (
    seq INTEGER PRIMARY KEY, method TEXT, path TEXT, query TEXT, idempotency_key TEXT,
    charge_key TEXT, body_sha256 TEXT, at REAL, status INTEGER, replayed INTEGER);
"""
_TABLES = ("intents", "charges", "keys", "customers", "settings", "requests")


class Store:
    """One connection, used by one thread."""

    def __init__(self, path: Path | None) -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path if path is not None else ":memory:")
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute("PRAGMA wal_autocheckpoint=4000")
        for kind in ("intents", "charges"):
            self._db.executescript(_OBJECTS.format(kind=kind))
        self._db.executescript(_SCHEMA)
        self._db.execute("DELETE FROM intents WHERE running = 1")
        self._db.commit()

    def commit(self) -> None:
        """Makes everything since the last commit durable against a kill, at once."""
        self._db.commit()

    def rollback(self) -> None:
        """Forgets everything since the last commit."""
        self._db.rollback()

    def close(self) -> None:
        """Forgets what was not committed and folds the log into the one file."""
        self._db.rollback()
        self._db.close()

    def clear(self) -> None:
        """Empties every table."""
        for table in _TABLES:
            self._db.execute(f"DELETE FROM {table}")  # noqa: S608 -- a name from the tuple above
        self._db.commit()

    def last_seq(self) -> int:
        """The highest number given out so far, 0 on an empty file."""
        query = (
            "SELECT max(coalesce((SELECT max(seq) FROM intents), 0),"
            " coalesce((SELECT max(seq) FROM charges), 0),"
            " coalesce((SELECT max(seq) FROM requests), 0))"
        )
        return int(self._db.execute(query).fetchone()[0])

    # -- settings -----------------------------------------------------------------------------

    def setting(self, name: str) -> Any:
        """A stored setting, None when it was never set."""
        row = self._db.execute("SELECT value FROM settings WHERE name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    def set_setting(self, name: str, value: Any) -> None:
        """Stores a setting as JSON."""
        self._db.execute(
            "INSERT OR REPLACE INTO settings (name, value) VALUES (?, ?)", (name, encode(value))
        )

    # -- idempotency keys ---------------------------------------------------------------------

    def answer(self, key: str) -> SavedAnswer | None:
        """The saved answer of a key, however old."""
        row = self._db.execute(
            "SELECT fingerprint, created, status, body, request_id FROM keys WHERE key = ?", (key,)
        ).fetchone()
        return None if row is None else SavedAnswer(*row)

    def save_answer(self, key: str, answer: SavedAnswer) -> None:
        """Saves the first answer of a key; one that was pruned is written over."""
        self._db.execute(
            "INSERT OR REPLACE INTO keys (key, fingerprint, created, status, body, request_id)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (
                key,
                answer.fingerprint,
                answer.created,
                answer.status,
                answer.body,
                answer.request_id,
            ),
        )

    def prune_keys(self, until: float) -> None:
        """Forgets the keys created at or before `until`."""
        self._db.execute("DELETE FROM keys WHERE created <= ?", (until,))

    # -- customers ----------------------------------------------------------------------------

    def customer(self, customer_id: str) -> tuple[bool, Json] | None:
        """(deleted, body) of a customer that was created or changed; None for an implicit one."""
        row = self._db.execute(
            "SELECT deleted, body FROM customers WHERE id = ?", (customer_id,)
        ).fetchone()
        return None if row is None else (bool(row[0]), json.loads(row[1]))

    def put_customer(self, body: Json, *, deleted: bool = False) -> None:
        """Stores a customer as it is now."""
        self._db.execute(
            "INSERT OR REPLACE INTO customers (id, deleted, body) VALUES (?, ?, ?)",
            (body["id"], deleted, encode(body)),
        )

    def customers(self, limit: int) -> list[Json]:
        """The customers that were created or changed, newest first."""
        rows = self._db.execute(
            "SELECT body FROM customers WHERE deleted = 0 ORDER BY rowid DESC LIMIT ?", (limit,)
        )
        return [json.loads(row[0]) for row in rows]

    # -- intents and charges ------------------------------------------------------------------

    def put(
        self,
        kind: Kind,
        seq: int,
        body: Json,
        *,
        idempotency_key: str | None,
        running: bool = False,
    ) -> None:
        """Stores an object as it is now, under the number that orders it in lists."""
        taken = kind == "charges" and body["status"] == "succeeded" and body["captured"]
        self._db.execute(
            f"INSERT OR REPLACE INTO {kind} (seq, id, customer, intent, created, running, taken,"  # noqa: S608 -- kind is one of two literals
            " idempotency_key, body) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                seq,
                body["id"],
                body["customer"],
                body.get("payment_intent"),
                body["created"],
                running,
                taken,
                idempotency_key,
                encode(body),
            ),
        )

    def drop_intent(self, seq: int) -> None:
        """Removes an intent whose create came to nothing."""
        self._db.execute("DELETE FROM intents WHERE seq = ?", (seq,))

    def get(self, kind: Kind, object_id: str) -> Stored | None:
        """An object by its id."""
        row = self._db.execute(
            f"SELECT seq, body, idempotency_key, running FROM {kind} WHERE id = ?",  # noqa: S608 -- kind is one of two literals
            (object_id,),
        ).fetchone()
        return None if row is None else Stored(row[0], json.loads(row[1]), row[2], bool(row[3]))

    def page(
        self,
        kind: Kind,
        filters: Sequence[tuple[str, str, Any]],
        *,
        after: tuple[int, int] | None = None,
        before: tuple[int, int] | None = None,
        limit: int,
    ) -> tuple[list[str], bool]:
        """(bodies newest first, has_more). `filters` are (column, comparison, value) of ours.

        `after` and `before` are (created, seq) of the cursor's object: older than `after`, or the
        ones just newer than `before`.
        """
        conditions = [f"{column} {comparison} ?" for column, comparison, _ in filters]
        values = [value for _, _, value in filters]
        cursor = after or before
        if cursor is not None:
            conditions.append(f"(created, seq) {'<' if after else '>'} (?, ?)")
            values += cursor
        where = " AND ".join(conditions) or "1"
        order = "ASC" if before and not after else "DESC"
        rows = self._db.execute(
            f"SELECT body FROM {kind} WHERE {where}"  # noqa: S608 -- our own columns and words
            f" ORDER BY created {order}, seq {order} LIMIT ?",
            (*values, limit + 1),
        ).fetchall()
        bodies = [row[0] for row in rows[:limit]]
        if order == "ASC":
            bodies.reverse()
        return bodies, len(rows) > limit

    def taken_charges(self) -> Iterator[tuple[str | None, Json]]:
        """(idempotency key, charge) for all money taken, oldest first; may be read slowly."""
        seq = 0
        while True:
            rows = self._db.execute(
                "SELECT seq, idempotency_key, body FROM charges WHERE taken = 1 AND seq > ?"
                " ORDER BY seq LIMIT ?",
                (seq, ROWS_AT_A_TIME),
            ).fetchall()
            for seq, key, body in rows:  # noqa: B007 -- the last seq is where the next page starts
                yield key, json.loads(body)
            if len(rows) < ROWS_AT_A_TIME:
                return

    # -- the request log ----------------------------------------------------------------------

    def log(self, entry: LoggedRequest) -> None:
        """Writes a request, or writes it again with its status."""
        self._db.execute(
            "INSERT OR REPLACE INTO requests VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                entry.seq,
                entry.method,
                entry.path,
                entry.query,
                entry.idempotency_key,
                entry.charge_key,
                entry.body_sha256,
                entry.at,
                entry.status,
                entry.replayed,
            ),
        )

    def logged(self) -> Iterator[LoggedRequest]:
        """All requests, oldest first; may be read slowly."""
        seq = 0
        while True:
            rows = self._db.execute(
                "SELECT * FROM requests WHERE seq > ? ORDER BY seq LIMIT ?", (seq, ROWS_AT_A_TIME)
            ).fetchall()
            for row in rows:
                seq = row[0]
                yield LoggedRequest(*row)
            if len(rows) < ROWS_AT_A_TIME:
                return
