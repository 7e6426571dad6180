"""What people do to billing records: recharge, void, resolve, replay; and polling, import,
recovery. Beside `models.ledger` the only writer of billing records, by the same rules.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy import TextClause
from sqlalchemy.exc import IntegrityError

from models import action_sql as sql
from models.database import rows, transaction
from models.decisions import first_poll_s, next_poll_s
from models.errors import NotFound, StateForbids
from models.ledger import TOLD_BY_STRIPE, object_values
from models.outcomes import Outcome
from models.records import NewRecord, Record, new_values, record_from_row
from models.states import Move, State, check_move

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine, RowMapping

    from models.limits import Limits

T = TypeVar("T")

BATCH: Final = 500
"""Rows of an import or a recovery that one statement carries."""
UNSETTLED_BATCH: Final = 5_000
"""Unsettled rows of a recovery that one statement moves, well within its time limit."""
EVENT_FIELDS: Final = (
    "customer_id",
    "billing_period",
    "amount_cents",
    "currency",
    "stripe_customer_id",
    "billing_run",
)
"""What Stripe's objects tell of their billing event."""
POLL_HOLD_S: Final = 60
"""How long a record that one sweep polls is left alone by the others."""


@dataclass(frozen=True, slots=True)
class Done:
    """What a manual action came to. `already`: the same request id had done it before."""

    record: Record
    already: bool = False


@dataclass(frozen=True, slots=True)
class ChargedRow:
    """A charge that Stripe or an earlier system has made. Amounts in smallest units."""

    customer_id: str
    billing_period: str
    charge_key: str
    fingerprint: str
    amount_cents: int
    currency: str
    stripe_customer_id: str
    billing_run: str
    payment_intent_id: str | None
    charge_id: str | None
    attempt_epoch: int = 0
    created: int | None = None
    """When Stripe made it, in Unix seconds; lists that look for it must begin before."""

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def shown(self) -> dict[str, Any]:
        """What a late truth needs of it; see `Ledger.late_truth`."""
        values = self.as_json() | {"event": json.dumps(self.event())}
        return {name: values[name] for name in TOLD_BY_STRIPE}

    def event(self) -> dict[str, Any]:
        """As much of its billing event as there is: a recharge can be asked for by it."""
        return {name: getattr(self, name) for name in EVENT_FIELDS}


class ImportConflict(StateForbids):
    """A row to be imported stands in the ledger with another charge."""

    def __init__(self, line: int) -> None:
        super().__init__(line)
        self.line = line

    def __str__(self) -> str:
        return f"line {self.line}: the ledger holds another charge for this identity"


class LedgerActions:
    """Manual actions. `actor` says in the audit who did it."""

    def __init__(self, engine: Engine, limits: Limits, actor: str) -> None:
        self.engine = engine
        self.limits = limits
        self.actor = actor

    def find(self, customer_id: str, billing_period: str) -> Record:
        """The record of an identity; raises NotFound."""
        record = self._by_identity(customer_id, billing_period)
        if record is None:
            raise NotFound(f"no billing record of {customer_id} {billing_period}")
        return record

    def recharge(
        self,
        record: Record,
        *,
        from_epoch: int,
        reason: str,
        request_id: str,
        payment_method: str | None = None,
    ) -> Done:
        """Start the epoch after `from_epoch`, once per request id and once per epoch.

        Raises StateForbids when the record is no known failure of that epoch any more.
        """
        if record.attempt_epoch != from_epoch:
            return self._refuse_or_already(
                record, request_id, f"is in epoch {record.attempt_epoch}"
            )
        values = {"payment_method": payment_method}
        return self._act(
            sql.RECHARGE,
            Move.RECHARGE,
            record,
            State.RESERVED,
            values=values,
            reason=reason,
            request_id=request_id,
        )

    def void(self, record: Record, *, reason: str, request_id: str) -> Done:
        """Decide that a record must not be charged. What is open at Stripe is canceled first."""
        return self._act(
            sql.VOID,
            Move.VOID,
            record,
            State.VOIDED,
            values={},
            reason=reason,
            request_id=request_id,
        )

    def tombstone(
        self,
        customer_id: str,
        billing_period: str,
        charge_key: str,
        *,
        reason: str,
        request_id: str,
    ) -> Record | None:
        """Void an identity before any event of it came; None when there is a record."""
        values = {
            "customer_id": customer_id,
            "billing_period": billing_period,
            "charge_key": charge_key,
        }
        found = self._rows(sql.TOMBSTONE, values | self._audit(Move.VOID, reason, request_id))
        return record_from_row(found[0]) if found else None

    def resolve(
        self,
        record: Record,
        target: State,
        *,
        reason: str,
        request_id: str,
        payment_intent_id: str | None = None,
        charge_id: str | None = None,
    ) -> Done:
        """Close a `review` as `charged` (by an object that was checked) or `rejected`."""
        values = {
            "to_state": target,
            "payment_intent_id": payment_intent_id,
            "charge_id": charge_id,
        }
        return self._act(
            sql.RESOLVE,
            Move.RESOLVE,
            record,
            target,
            values=values,
            reason=reason,
            request_id=request_id,
        )

    def replay(self, letter_id: int, new: NewRecord, *, reason: str) -> Record | None:
        """Make a dead letter's event a `reserved` record and resolve the letter, or neither.

        None when the identity has a record already, or the letter is resolved.
        """
        values = new_values(new) | {"letter_id": letter_id}
        found = self._rows(sql.REPLAY, values | self._audit(Move.REPLAY, reason, None))
        return record_from_row(found[0]) if found else None

    # -- open intents --------------------------------------------------------------------

    def take_polls(self, batch: int) -> list[tuple[Record, datetime]]:
        """Records whose open intents are to be asked about now, with the ledger's clock."""
        found = self._rows(sql.TAKE_POLLS, {"batch": batch, "hold_s": POLL_HOLD_S})
        return [(record_from_row(row), row["now"]) for row in found]

    def record_poll(self, record: Record, outcome: Outcome, why: str) -> Record | None:
        """Write what an open intent came to; None when the record has moved meanwhile."""
        target = outcome.state
        check_move(Move.POLL, record.state, target)
        values = self._as_read(record)
        if target is record.state:
            values["poll_s"] = next_poll_s(target, record.deferrals, self.limits)
            found = self._rows(sql.STILL_OPEN, values)
        else:
            values |= object_values(outcome) | {"to_state": target}
            values["poll_s"] = first_poll_s(target, self.limits)
            found = self._rows(sql.POLLED, values | self._audit(Move.POLL, why, None))
        return record_from_row(found[0]) if found else None

    # -- charges from elsewhere --------------------------------------------------------------

    def import_charges(self, lines: Iterable[tuple[int, ChargedRow]]) -> tuple[int, int]:
        """Take over charges of an earlier system, all or none; returns (new, known).

        `lines`: (line number, row). Raises ImportConflict with the number of the first row
        whose identity stands in the ledger with another charge.
        """
        new = known = 0
        with transaction(self.engine) as connection:
            for batch in _batches(lines):
                inserted = self._import_batch(connection, batch)
                new += inserted
                known += len(batch) - inserted
        return new, known

    def _import_batch(self, connection: Connection, batch: Sequence[tuple[int, ChargedRow]]) -> int:
        values = {"rows": json.dumps([row.as_json() for _, row in batch])}
        audit = self._audit(Move.IMPORT, "import", None)
        inserted = connection.execute(sql.IMPORT, values | audit).all()
        keys = {"keys": [row.charge_key for _, row in batch]}
        standing = {
            found["charge_key"]: found
            for found in connection.execute(sql.IMPORTED_AS, keys).mappings()
        }
        for line, row in batch:
            if not _is_same_charge(standing[row.charge_key], row):
                raise ImportConflict(line)
        return len(inserted)

    def start_recovery(self, since: datetime) -> None:
        """From now until `end_recovery` no worker starts."""
        self._rows(sql.START_RECOVERY, {"since": since})

    def recover_charged(self, found: Iterable[ChargedRow]) -> int:
        """Make every Stripe success's record `charged`, whatever it says; returns how many.

        One of another amount or currency than its record's becomes `review`, and is not counted.
        """
        changed = 0
        for batch in _batches(enumerate(found)):
            values = {"rows": json.dumps([row.as_json() for _, row in batch])}
            audit = self._audit(Move.RECOVER, "success at Stripe", None)
            done = self._rows(sql.RECOVER_CHARGED, values | audit)
            changed += sum(row["state"] == State.CHARGED for row in done)
        return changed

    def recover_open(self, found: Iterable[tuple[ChargedRow, State]]) -> int:
        """Make records for objects at Stripe that may still take money, where there are none.

        A record that has an earlier epoch than its object is brought up to it.

        They are polled from now on; returns how many. Without them, a repeat of such an event
        would be charged anew once Stripe has forgotten its idempotency key.
        """
        made = 0
        for batch in _batches(enumerate(found)):
            values = {"rows": json.dumps([_open_row(row, state) for _, (row, state) in batch])}
            audit = self._audit(Move.RECOVER, "open at Stripe", None)
            made += len(self._rows(sql.RECOVER_OPEN, values | audit))
        return made

    def recover_unsettled(self, since: datetime) -> int:
        """Make every unsettled record one that must be looked up; returns how many."""
        audit = self._audit(Move.RECOVER, "unsettled at the restore", None)
        moved, after_key = 0, ""
        while True:
            values = {"since": since, "after_key": after_key, "batch": UNSETTLED_BATCH}
            keys = [row["charge_key"] for row in self._rows(sql.RECOVER_UNSETTLED, values | audit)]
            moved += len(keys)
            if len(keys) < UNSETTLED_BATCH:
                return moved
            after_key = max(keys)

    def recover_times(self) -> int:
        """Have open intents polled that were written in the future; returns how many."""
        return len(self._rows(sql.RECOVER_TIMES, {}))

    def end_recovery(self) -> None:
        """Let workers start again."""
        self._rows(sql.END_RECOVERY, {})

    # -- plumbing ------------------------------------------------------------------------

    def _act(
        self,
        statement: TextClause,
        move: Move,
        record: Record,
        target: State,
        *,
        values: Mapping[str, Any],
        reason: str,
        request_id: str,
    ) -> Done:
        if self._seen(record, request_id):
            return Done(self._again(record), already=True)
        check_move(move, record.state, target)
        audit = self._audit(move, reason, request_id)
        try:
            found = self._rows(statement, {**self._as_read(record), **values, **audit})
        except IntegrityError:
            if not self._seen(record, request_id):
                raise
            # The same request, a moment ago, through another door.
            return Done(self._again(record), already=True)
        if found:
            return Done(record_from_row(found[0]))
        return self._refuse_or_already(record, request_id, "has moved meanwhile")

    def _refuse_or_already(self, record: Record, request_id: str, why: str) -> Done:
        if self._seen(record, request_id):
            return Done(self._again(record), already=True)
        current = self._again(record)
        raise StateForbids(
            f"the record of {record.customer_id} {record.billing_period} {why}: "
            f"it is {current.state}, epoch {current.attempt_epoch}"
        )

    def _again(self, record: Record) -> Record:
        return self.find(record.customer_id, record.billing_period)

    def _seen(self, record: Record, request_id: str) -> bool:
        """Whether this request was done before; raises StateForbids if it was another's."""
        found = self._rows(sql.REQUEST_SEEN, {"request_id": request_id})
        if found and found[0]["charge_key"] != record.charge_key:
            raise StateForbids("the request id was used for another record; give a new one")
        return bool(found)

    def _by_identity(self, customer_id: str, billing_period: str) -> Record | None:
        identity = {"customer_id": customer_id, "billing_period": billing_period}
        found = self._rows(sql.BY_IDENTITY, identity)
        return record_from_row(found[0]) if found else None

    def _rows(self, statement: TextClause, values: Mapping[str, Any]) -> Sequence[RowMapping]:
        return rows(self.engine, statement, values)

    def _audit(self, move: Move, reason: str, request_id: str | None) -> dict[str, Any]:
        return {"move": move, "actor": self.actor, "reason": reason, "request_id": request_id}

    @staticmethod
    def _as_read(record: Record) -> dict[str, Any]:
        return {
            "charge_key": record.charge_key,
            "from_state": record.state,
            "epoch": record.attempt_epoch,
        }


def _is_same_charge(standing: RowMapping, row: ChargedRow) -> bool:
    ids = {standing["charge_id"], standing["payment_intent_id"]} - {None}
    return bool(ids & {row.charge_id, row.payment_intent_id}) and (
        (standing["amount_cents"], standing["currency"]) == (row.amount_cents, row.currency)
    )


def _open_row(row: ChargedRow, state: State) -> dict[str, Any]:
    return row.as_json() | {"state": state, "event": row.event()}


def _batches(lines: Iterable[tuple[int, T]]) -> Iterable[Sequence[tuple[int, T]]]:
    batch: list[tuple[int, T]] = []
    for line in lines:
        batch.append(line)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
