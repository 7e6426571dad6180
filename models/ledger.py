"""The ledger: the only writer of billing records.

Each method is one statement that commits by itself, names the state and lease it expects,
and says what happened. None is open while anybody talks to Stripe.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID, uuid4

from sqlalchemy import TextClause

from models import ledger_sql as sql
from models.database import rows
from models.decisions import RecordStatus, first_poll_s
from models.errors import LedgerUnavailable
from models.outcomes import Outcome, OutcomeKind
from models.records import (
    Claim,
    NewRecord,
    Record,
    Snapshot,
    StoredRequest,
    new_values,
    record_from_row,
)
from models.states import MONEY_STATES, Move, State, check_move, is_settled

if TYPE_CHECKING:
    from sqlalchemy import Engine, RowMapping

    from models.limits import Limits

CONFIRM_TRIES: Final = 3
"""Reads of a record after a commit whose answer was lost."""
CONFIRM_PAUSE_S: Final = 0.2
TOLD_BY_STRIPE: Final = (
    "fingerprint",
    "amount_cents",
    "currency",
    "stripe_customer_id",
    "billing_run",
    "event",
)
"""What a tombstone lacks and an object at Stripe shows; the event as JSON, for a recharge."""


class Applied(StrEnum):
    """What a write of an outcome came to."""

    APPLIED = "applied"
    FENCED = "fenced"
    """Another worker holds or has moved the record: only the attempt was written."""
    LATE_CHARGED = "late_charged"
    """A late success made the record `charged`."""
    LATE_REVIEW = "late_review"
    """A late success of a record that was settled without money: a person decides."""
    DOUBLE_CHARGE = "double_charge"
    """A second success for one charge key: the alarm that must never ring."""


@dataclass(frozen=True, slots=True)
class Recorded:
    applied: Applied
    record: Record | None


@dataclass(frozen=True, slots=True)
class Retry:
    """When an unsettled record is due again, and what the next step may rest on."""

    after_s: float
    until_proof: bool = False
    """Not before absence at Stripe can be proof."""


def boot_clock_s() -> float:
    """Seconds on the clock that also runs while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Ledger:
    """All reads and writes of billing records. `actor` stands in the audit."""

    def __init__(self, engine: Engine, limits: Limits, actor: str) -> None:
        self.engine = engine
        self.limits = limits
        self.actor = actor

    # -- reads ---------------------------------------------------------------------------

    def read(self, charge_key: str) -> Snapshot:
        """The record of a charge key and the ledger's clock, in one read."""
        row = self._rows(sql.READ, {"charge_key": charge_key})[0]
        record = record_from_row(row) if row["charge_key"] is not None else None
        return Snapshot(record=record, now=row["now"])

    def read_statuses(self, keys: Sequence[str]) -> dict[str, RecordStatus]:
        """Of every one of these charge keys that has a row: its state, and what was asked for.

        What may differ in a repeat (see RecordStatus) is read of settled records only.
        """
        if not keys:
            return {}
        return {
            row.pop("charge_key"): RecordStatus(**{**row, "state": State(row["state"])})
            for row in map(dict, self._rows(sql.READ_STATUSES, {"keys": list(keys)}))
        }

    def stored_request(self, charge_key: str, epoch: int) -> StoredRequest | None:
        """The request that the first claim of this epoch stored."""
        rows = self._rows(sql.STORED_REQUEST, {"charge_key": charge_key, "epoch": epoch})
        return StoredRequest(**rows[0]) if rows else None

    # -- claims --------------------------------------------------------------------------

    def claim_new(self, new: NewRecord, request: StoredRequest, method: str | None) -> Claim | None:
        """Insert the record as `sent` and leased to us; None when a row is there already."""
        values = new_values(new) | self._request_values(request)
        values |= {"payment_method": method, **self._audit(Move.CLAIM, f"first from {new.source}")}
        return self._claim(sql.INSERT_SENT, values, new.charge_key)

    def claim(self, record: Record, request: StoredRequest, method: str | None) -> Claim | None:
        """Take a `reserved` or `sent` record as it was read; None when it has moved since."""
        check_move(Move.CLAIM, record.state, State.SENT)
        values = self._expect(record) | self._request_values(request)
        values |= {
            "payment_method": method,
            "resend_window_s": self.limits.resend_window_s,
            **self._audit(Move.CLAIM, None),
        }
        return self._claim(sql.CLAIM, values, record.charge_key)

    def lease(self, record: Record) -> Claim | None:
        """The right to look a `sent` record up, which sends nothing."""
        return self._claim(sql.LEASE, self._expect(record), record.charge_key)

    def _claim(
        self, statement: TextClause, values: dict[str, Any], charge_key: str
    ) -> Claim | None:
        token = uuid4()
        deadline_s = boot_clock_s() + self.limits.lease_s
        values |= {"token": token, "lease_s": self.limits.lease_s}
        try:
            rows = self._rows(statement, values)
        except LedgerUnavailable:
            # The commit may have happened: only the row itself can say.
            record = self._confirm(charge_key, token)
        else:
            record = record_from_row(rows[0]) if rows else None
        return Claim(record, token, deadline_s) if record is not None else None

    def _confirm(self, charge_key: str, token: UUID) -> Record | None:
        """Whether a claim of ours was committed; raises LedgerUnavailable if nobody can say."""
        for attempt in range(CONFIRM_TRIES):
            try:
                record = self.read(charge_key).record
            except LedgerUnavailable:
                if attempt == CONFIRM_TRIES - 1:
                    raise
                time.sleep(CONFIRM_PAUSE_S)
            else:
                return record if record is not None and record.lease_token == token else None
        return None

    # -- preparation that could not finish -------------------------------------------------

    def reserve(self, new: NewRecord, error_code: str, retry_s: float) -> bool:
        """Keep an event whose preparation could not finish; False when a row is there."""
        values = new_values(new) | {
            "payment_method": None,
            "retry_s": retry_s,
            "error_code": error_code,
            **self._audit(Move.CLAIM, error_code),
        }
        return bool(self._rows(sql.INSERT_RESERVED, values))

    def defer(self, record: Record, error_code: str, retry_s: float) -> bool:
        """Push a `reserved` record whose preparation failed again further back."""
        values = {"charge_key": record.charge_key, "epoch": record.attempt_epoch}
        return bool(self._rows(sql.DEFER, values | {"error_code": error_code, "retry_s": retry_s}))

    def postpone(self, record: Record, error_code: str, retry_s: float) -> bool:
        """Push a `sent` record that cannot be acted on now further back; nothing is judged."""
        values = {"charge_key": record.charge_key, "epoch": record.attempt_epoch}
        return bool(
            self._rows(sql.POSTPONE, values | {"error_code": error_code, "retry_s": retry_s})
        )

    def give_up(self, record: Record, reason: str) -> bool:
        """To `review`, as long as the record is as it was read."""
        check_move(Move.GIVE_UP, record.state, State.REVIEW)
        return bool(
            self._rows(sql.GIVE_UP, self._expect(record) | self._audit(Move.GIVE_UP, reason))
        )

    # -- outcomes ------------------------------------------------------------------------

    def record_outcome(self, claim: Claim, outcome: Outcome, retry: Retry) -> Recorded:
        """Write what the call came to: the attempt always, the record while the lease is ours.

        Safe to repeat after a lost answer. A success that comes after the record has gone
        on is kept as a late truth.
        """
        target = outcome.state
        check_move(Move.OUTCOME, State.SENT, target)
        statement = {State.RESERVED: sql.RECORD_RESERVED, State.SENT: sql.RECORD_UNKNOWN}.get(
            target, sql.RECORD_SETTLED
        )
        values = self._outcome_values(claim, outcome, retry)
        values |= self._audit(Move.OUTCOME, outcome.error_code or outcome.kind)
        rows = self._rows(statement, values)
        if rows:
            return Recorded(Applied.APPLIED, record_from_row(rows[0]))
        return self.late_truth(claim.record.charge_key, outcome)

    def record_finding(self, claim: Claim, outcome: Outcome, retry: Retry, why: str) -> Recorded:
        """Write what a look-up found, while its lease is ours."""
        target = outcome.state
        check_move(Move.LOOK_UP, State.SENT, target)
        statement = {State.RESERVED: sql.FOUND_ABSENT, State.SENT: sql.FOUND_NOTHING_YET}.get(
            target, sql.FOUND_SETTLED
        )
        values = self._outcome_values(claim, outcome, retry) | {"unknown": 0}
        rows = self._rows(statement, values | self._audit(Move.LOOK_UP, why))
        if rows:
            return Recorded(Applied.APPLIED, record_from_row(rows[0]))
        return self.late_truth(claim.record.charge_key, outcome)

    def late_truth(
        self,
        charge_key: str,
        outcome: Outcome,
        shown: Mapping[str, object] | None = None,
        *,
        doubtful: bool = False,
    ) -> Recorded:
        """Keep a success whose record has gone on without it; anything else changes nothing.

        `shown`: TOLD_BY_STRIPE as the object shows them, which a tombstone has to be given to
        become anything else. `doubtful`: whether it is this record's money is for a person.
        """
        record = self.read(charge_key).record
        if record is None or outcome.kind is not OutcomeKind.CHARGED:
            return Recorded(Applied.FENCED, record)
        if record.fingerprint is None and shown is None:
            return Recorded(Applied.FENCED, record)
        known = record.state in MONEY_STATES or self._was_late(record)
        if known and not _same_object(record, outcome):
            return Recorded(Applied.DOUBLE_CHARGE, record)
        if record.state is State.CHARGED:
            return Recorded(Applied.FENCED, record)
        other_money = doubtful or (
            shown is not None and record.is_other_money(shown["amount_cents"], shown["currency"])
        )
        if record.state is State.REVIEW and (known or other_money):
            # Also when the answer to the first write was lost, and this one repeats it.
            return Recorded(Applied.LATE_REVIEW, record)
        calm = (State.REVIEW, State.PROCESSING)
        unsure = other_money or (is_settled(record.state) and record.state not in calm)
        target = State.REVIEW if unsure else State.CHARGED
        check_move(Move.LATE_TRUTH, record.state, target)
        values = object_values(outcome) | {
            "charge_key": charge_key,
            "from_state": record.state,
            "to_state": target,
            "epoch": record.attempt_epoch,
            **(shown or dict.fromkeys(TOLD_BY_STRIPE)),
            **self._audit(Move.LATE_TRUTH, "late success"),
        }
        rows = self._rows(sql.LATE_TRUTH, values)
        if not rows:
            # It moved between the read and the write: judge it as it is now.
            return self.late_truth(charge_key, outcome, shown, doubtful=doubtful)
        applied = Applied.LATE_REVIEW if unsure else Applied.LATE_CHARGED
        return Recorded(applied, record_from_row(rows[0]))

    def _was_late(self, record: Record) -> bool:
        """Whether a late success has brought it to `review`, where a person decides."""
        if record.state is not State.REVIEW:
            return False
        last = self._rows(sql.LAST_MOVE, {"charge_key": record.charge_key})
        return bool(last) and last[0]["move"] == Move.LATE_TRUTH

    def adopt(self, record: Record, outcome: Outcome, why: str) -> Recorded:
        """Take over money that Stripe shows for a record which nobody acts on.

        A record that has moved since it was read keeps a success as a late truth.
        """
        check_move(Move.ADOPT, record.state, outcome.state)
        values = self._expect(record) | object_values(outcome) | self._audit(Move.ADOPT, why)
        values |= {
            "to_state": outcome.state,
            "poll_s": first_poll_s(outcome.state, self.limits),
        }
        rows = self._rows(sql.ADOPT, values)
        if rows:
            return Recorded(Applied.APPLIED, record_from_row(rows[0]))
        return self.late_truth(record.charge_key, outcome)

    # -- the sweep -----------------------------------------------------------------------

    def dispatch_due(self, after_key: str, batch: int) -> list[str]:
        """Charge keys of due unsettled records after this key, now marked as dispatched."""
        values = {
            "after_key": after_key,
            "batch": batch,
            "redispatch_after_s": self.limits.redispatch_after_s,
        }
        return sorted(row["charge_key"] for row in self._rows(sql.DISPATCH_DUE, values))

    # -- plumbing ------------------------------------------------------------------------

    def _rows(self, statement: TextClause, values: Mapping[str, Any]) -> Sequence[RowMapping]:
        return rows(self.engine, statement, values)

    def _audit(self, move: Move, reason: str | None) -> dict[str, Any]:
        return {"move": move, "actor": self.actor, "reason": reason, "request_id": None}

    @staticmethod
    def _expect(record: Record) -> dict[str, Any]:
        return {
            "charge_key": record.charge_key,
            "from_state": record.state,
            "epoch": record.attempt_epoch,
            "expected_token": record.lease_token,
        }

    @staticmethod
    def _request_values(request: StoredRequest) -> dict[str, Any]:
        return {
            "endpoint": request.endpoint,
            "params": json.dumps(request.params),
            "api_version": request.api_version,
            "upstream_key_id": request.upstream_key_id,
            "idempotency_key": request.idempotency_key,
        }

    def _outcome_values(self, claim: Claim, outcome: Outcome, retry: Retry) -> dict[str, Any]:
        return object_values(outcome) | {
            "charge_key": claim.record.charge_key,
            "token": claim.token,
            "to_state": outcome.state,
            "outcome": outcome.kind,
            "http_status": outcome.http_status,
            "stripe_request_id": outcome.request_id,
            "replayed": outcome.replayed,
            "retry_s": retry.after_s,
            "poll_s": first_poll_s(outcome.state, self.limits),
            "unknown": 1,
            "look_up": outcome.kind is OutcomeKind.UNKNOWN_LOOK_UP,
            "prove": retry.until_proof,
            "max_unknowns": self.limits.max_unknowns,
            "proof_of_absence_s": self.limits.proof_of_absence_s,
        }


def object_values(outcome: Outcome) -> dict[str, Any]:
    """The columns of a record that an outcome writes."""
    return {
        "payment_intent_id": outcome.payment_intent_id,
        "charge_id": outcome.charge_id,
        "error_code": outcome.error_code,
        "decline_code": outcome.decline_code,
        "error_message": outcome.error_message,
    }


def _same_object(record: Record, outcome: Outcome) -> bool:
    """Whether a success is the one the record already stands for."""
    ours = {record.payment_intent_id, record.charge_id} - {None}
    return bool(ours & ({outcome.payment_intent_id, outcome.charge_id} - {None}))
