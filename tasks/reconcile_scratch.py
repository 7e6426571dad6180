"""What a reconciliation collects, in a scratch file of its own: memory stays flat at any length.

The file is SQLite's own temporary one and goes with the process; nothing of it is kept.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from models.ledger_actions import ChargedRow
from models.reconciling import LedgerSide, Money, StripeSide, Verdict, compare
from models.states import State

if TYPE_CHECKING:
    from models.events import BillingEvent
    from models.records import Record

BATCH: Final = 500
_TABLES: Final = """
CREATE TABLE expected (key TEXT PRIMARY KEY, line INTEGER, customer TEXT, period TEXT,
    amount INTEGER, currency TEXT, fingerprint TEXT, body BLOB) WITHOUT ROWID;
CREATE TABLE ledger (key TEXT PRIMARY KEY, customer TEXT, period TEXT, amount INTEGER,
    currency TEXT, state TEXT, intent TEXT, charge TEXT, adopted INTEGER DEFAULT 0) WITHOUT ROWID;
CREATE INDEX ledger_intent ON ledger (intent);
CREATE INDEX ledger_charge ON ledger (charge);
CREATE TABLE stripe (object TEXT PRIMARY KEY, key TEXT, customer TEXT, period TEXT,
    amount INTEGER, currency TEXT, success INTEGER, open INTEGER, intent TEXT, charge TEXT,
    refunded INTEGER DEFAULT 0, disputed INTEGER DEFAULT 0, row TEXT) WITHOUT ROWID;
CREATE INDEX stripe_key ON stripe (key);
"""
_LINES: Final = """
WITH seen AS (
    SELECT key, sum(success) AS successes, sum(open) AS open, sum(refunded) AS refunded,
        max(disputed) AS disputed, min(CASE WHEN success THEN amount END) AS amount,
        min(CASE WHEN success THEN currency END) AS currency,
        min(CASE WHEN success THEN object END) AS object,
        min(customer) AS customer, min(period) AS period
    FROM stripe GROUP BY key),
keys AS (
    SELECT key FROM expected UNION SELECT key FROM ledger
    UNION SELECT key FROM seen WHERE successes OR open)
SELECT keys.key, COALESCE(e.customer, l.customer, s.customer) AS customer,
    COALESCE(e.period, l.period, s.period) AS period, e.line,
    e.amount AS expected_amount, e.currency AS expected_currency,
    l.state, l.amount AS ledger_amount, l.currency AS ledger_currency, l.adopted,
    s.amount AS stripe_amount, s.currency AS stripe_currency, s.object,
    COALESCE(s.successes, 0) AS successes, COALESCE(s.open, 0) AS open,
    COALESCE(s.refunded, 0) AS refunded, COALESCE(s.disputed, 0) AS disputed
FROM keys LEFT JOIN expected e USING (key) LEFT JOIN ledger l USING (key)
    LEFT JOIN seen s USING (key)
ORDER BY 2, 3, 1
"""


@dataclass(frozen=True, slots=True)
class Line:
    """One charge key of a reconciliation. Amounts in the currency's smallest unit."""

    verdict: Verdict
    customer_id: str | None
    billing_period: str | None
    charge_key: str
    expected_line: int | None
    currency: str | None
    expected_cents: int | None
    ledger_state: str | None
    ledger_cents: int | None
    stripe_cents: int | None
    stripe_object: str | None
    refunded_cents: int
    disputed: bool
    adopted: bool
    """The ledger had lost it, and has it again."""


LINE_COLUMNS: Final = tuple(Line.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class Seen:
    """An object of ours at Stripe. `row` is what the ledger would say of a success."""

    object_id: str
    charge_key: str
    amount_cents: int | None
    currency: str | None
    success: bool
    is_open: bool
    intent: str | None
    charge: str | None
    customer_id: str | None
    billing_period: str | None
    row: ChargedRow | None


class Scratch:
    """Three tables and the comparison over them. Use it from one thread, and close it."""

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None)
        self._db.row_factory = sqlite3.Row
        self._db.executescript("PRAGMA synchronous=off; PRAGMA journal_mode=off;" + _TABLES)
        self.expecting = False

    def close(self) -> None:
        """Forget everything."""
        self._db.close()

    # -- filling -------------------------------------------------------------------------

    def expect(self, line: int, key: str, event: BillingEvent, body: bytes) -> int | None:
        """Add an expected event; the number of the earlier line that says otherwise, or None."""
        self.expecting = True
        values = (
            key,
            line,
            event.customer_id,
            event.billing_period,
            event.amount_cents,
            event.currency,
            event.fingerprint,
            body,
        )
        added = self._db.execute(
            "INSERT OR IGNORE INTO expected VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values
        )
        if added.rowcount:
            return None
        found = self._db.execute("SELECT line, fingerprint FROM expected WHERE key = ?", (key,))
        earlier = found.fetchone()
        return None if earlier["fingerprint"] == event.fingerprint else int(earlier["line"])

    def add_records(self, records: Iterable[Record], *, adopted: bool = False) -> None:
        """Add or replace what the ledger says."""
        self._db.executemany(
            "INSERT OR REPLACE INTO ledger VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    record.charge_key,
                    record.customer_id,
                    record.billing_period,
                    record.amount_cents,
                    record.currency,
                    str(record.state),
                    record.payment_intent_id,
                    record.charge_id,
                    int(adopted),
                )
                for record in records
            ],
        )

    def add_seen(self, seen: Seen) -> None:
        """Add an object at Stripe."""
        values = (
            seen.object_id,
            seen.charge_key,
            seen.customer_id,
            seen.billing_period,
            seen.amount_cents,
            seen.currency,
            int(seen.success),
            int(seen.is_open),
            seen.intent,
            seen.charge,
            None if seen.row is None else json.dumps(asdict(seen.row)),
        )
        self._db.execute(
            "INSERT OR IGNORE INTO stripe (object, key, customer, period, amount, currency, "
            "success, open, intent, charge, row) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            values,
        )

    def mark(self, object_id: str, refunded_cents: int, *, disputed: bool) -> bool:
        """Note what was given back of an object that was added; False if it was not."""
        marked = self._db.execute(
            # An intent may have had several charges, of which others failed.
            "UPDATE stripe SET refunded = max(refunded, ?), disputed = max(disputed, ?) "
            "WHERE object = ?",
            (refunded_cents, int(disputed), object_id),
        )
        return bool(marked.rowcount)

    # -- asking --------------------------------------------------------------------------

    def concerns(self, key: str) -> bool:
        """Whether a charge key is one that this reconciliation is about."""
        found = self._db.execute(
            "SELECT 1 FROM expected WHERE key = ?1 UNION SELECT 1 FROM ledger WHERE key = ?1",
            (key,),
        )
        return found.fetchone() is not None

    def key_of_object(self, *ids: str | None) -> str | None:
        """The charge key whose ledger row names one of these objects (imported charges)."""
        for object_id in filter(None, ids):
            found = self._db.execute(
                "SELECT key FROM ledger WHERE intent = ?1 OR charge = ?1", (object_id,)
            ).fetchone()
            if found is not None:
                return str(found["key"])
        return None

    def objects_of(self, key: str) -> tuple[str | None, str | None]:
        """(intent, charge) that the ledger names for a charge key."""
        found = self._db.execute("SELECT intent, charge FROM ledger WHERE key = ?", (key,))
        row = found.fetchone()
        return (None, None) if row is None else (row["intent"], row["charge"])

    def success_of(self, key: str) -> tuple[ChargedRow | None, str | None, str | None]:
        """The success at Stripe: the ledger's row for it (None: not ours), intent and charge."""
        found = self._db.execute(
            "SELECT row, intent, charge FROM stripe WHERE key = ? AND success", (key,)
        ).fetchone()
        if found is None:
            return None, None, None
        row = None if found["row"] is None else ChargedRow(**json.loads(found["row"]))
        return row, found["intent"], found["charge"]

    def unknown_to_ledger(self) -> Iterator[list[str]]:
        """Batches of expected charge keys without a ledger row."""
        yield from self._batches(
            "SELECT key FROM expected WHERE key > ? AND key NOT IN (SELECT key FROM ledger) "
            "ORDER BY key LIMIT ?"
        )

    def body(self, key: str) -> bytes:
        """The original bytes of an expected event."""
        found = self._db.execute("SELECT body FROM expected WHERE key = ?", (key,))
        return bytes(found.fetchone()["body"])

    def lines(self) -> Iterator[Line]:
        """Every charge key with its verdict, by customer and period."""
        for row in self._db.execute(_LINES):
            yield _line(row, self.expecting)

    def keys_with(self, verdict: Verdict) -> list[str]:
        """The charge keys of one verdict: few, unless something is very wrong."""
        return [line.charge_key for line in self.lines() if line.verdict is verdict]

    def _batches(self, statement: str) -> Iterator[list[str]]:
        after = ""
        while batch := [str(row["key"]) for row in self._db.execute(statement, (after, BATCH))]:
            yield batch
            after = batch[-1]


def _line(row: sqlite3.Row, expecting: bool) -> Line:
    expected = _money(row["expected_amount"], row["expected_currency"])
    ledger = None
    if row["state"] is not None:
        money = _money(row["ledger_amount"], row["ledger_currency"])
        ledger = LedgerSide(State(row["state"]), money)
    stripe = StripeSide(
        successes=row["successes"],
        open_objects=row["open"],
        money=_money(row["stripe_amount"], row["stripe_currency"]),
    )
    return Line(
        verdict=compare(expected, ledger, stripe, expecting=expecting),
        customer_id=row["customer"],
        billing_period=row["period"],
        charge_key=row["key"],
        expected_line=row["line"],
        currency=row["expected_currency"] or row["ledger_currency"] or row["stripe_currency"],
        expected_cents=row["expected_amount"],
        ledger_state=row["state"],
        ledger_cents=row["ledger_amount"],
        stripe_cents=row["stripe_amount"],
        stripe_object=row["object"],
        refunded_cents=row["refunded"],
        disputed=bool(row["disputed"]),
        adopted=bool(row["adopted"]),
    )


def _money(amount: Any, currency: Any) -> Money | None:
    return None if amount is None or currency is None else Money(amount, currency)
