"""The values that go into and come out of the ledger."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from models.decisions import RecordView
from models.events import BillingEvent
from models.states import State

if TYPE_CHECKING:
    from sqlalchemy import RowMapping


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A request to Stripe as it is kept with its attempt and sent again to the byte."""

    endpoint: str
    """`payment_intents` or `charges`."""
    params: dict[str, Any]
    api_version: str
    upstream_key_id: str
    """Digest of the Stripe account key that it goes out with."""
    idempotency_key: str


@dataclass(frozen=True, slots=True)
class Record:
    """A billing record as it was read. Times are `ledger_now()`'s, amounts smallest units."""

    customer_id: str
    billing_period: str
    charge_key: str
    fingerprint: str | None
    amount_cents: int | None
    currency: str | None
    stripe_customer_id: str | None
    billing_run: str | None
    state: State
    attempt_epoch: int
    payment_method: str | None
    request_id: str | None
    lease_token: UUID | None
    lease_expires_at: datetime | None
    first_sent_at: datetime | None
    last_sent_at: datetime | None
    next_attempt_at: datetime | None
    attempts: int
    unknowns: int
    claims: int
    deferrals: int
    look_up: bool
    payment_intent_id: str | None
    charge_id: str | None
    error_code: str | None
    decline_code: str | None
    error_message: str | None
    source: str | None
    event: dict[str, Any] | None
    created_at: datetime
    updated_at: datetime
    settled_at: datetime | None

    def is_other_money(self, amount_cents: object, currency: object) -> bool:
        """Whether an object at Stripe is of another amount or currency than was asked for.

        A tombstone asked for none.
        """
        asked = (self.amount_cents, self.currency)
        return self.amount_cents is not None and (amount_cents, currency) != asked

    @property
    def view(self) -> RecordView:
        """The columns that `decide` rests on."""
        return RecordView(
            state=self.state,
            fingerprint=self.fingerprint,
            lease_expires_at=self.lease_expires_at,
            next_attempt_at=self.next_attempt_at,
            first_sent_at=self.first_sent_at,
            last_sent_at=self.last_sent_at,
            attempts=self.attempts,
            unknowns=self.unknowns,
            claims=self.claims,
            look_up=self.look_up,
        )


RECORD_COLUMNS: tuple[str, ...] = tuple(Record.__dataclass_fields__)


def record_from_row(row: RowMapping) -> Record:
    """A record out of a row that has at least its columns."""
    values = {name: row[name] for name in RECORD_COLUMNS}
    values["state"] = State(values["state"])
    return Record(**values)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A record (None: no row) and the ledger's clock at the moment of the same read."""

    record: Record | None
    now: datetime


@dataclass(frozen=True, slots=True)
class Claim:
    """A worker's time-limited right to act, as the ledger committed it."""

    record: Record
    token: UUID
    boot_deadline_s: float
    """On this host's boot-time clock: from here on the lease may have passed to another."""

    @property
    def earlier_unknown(self) -> bool:
        """Whether the same idempotency key was sent before without a definite outcome."""
        return self.record.attempts > 1


@dataclass(frozen=True, slots=True)
class NewRecord:
    """What the first insert of a billing record takes from its event."""

    event: BillingEvent
    charge_key: str
    source: str


def new_values(new: NewRecord) -> dict[str, Any]:
    """The columns that the first insert of a record takes from its event."""
    event = new.event
    return {
        "customer_id": event.customer_id,
        "billing_period": event.billing_period,
        "charge_key": new.charge_key,
        "fingerprint": event.fingerprint,
        "amount_cents": event.amount_cents,
        "currency": event.currency,
        "stripe_customer_id": event.stripe_customer_id,
        "billing_run": event.billing_run,
        "source": new.source,
        "event": json.dumps(event.to_json()),
    }
