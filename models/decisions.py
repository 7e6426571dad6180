"""What to do next, as pure functions: for a worker with a record, for a bridge with a delivery."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING

from models.states import State, is_settled

if TYPE_CHECKING:
    from models.limits import Limits


@dataclass(frozen=True, slots=True)
class RecordView:
    """The columns of a billing record that decisions rest on. Times are `ledger_now()`'s."""

    state: State
    fingerprint: str | None
    """None on a tombstone, which stands for every event of its identity."""
    lease_expires_at: datetime | None = None
    next_attempt_at: datetime | None = None
    first_sent_at: datetime | None = None
    last_sent_at: datetime | None = None
    attempts: int = 0
    """Sends since the record was last `reserved`."""
    unknowns: int = 0
    """Of those, the ones recorded as unknown."""
    claims: int = 0
    """Claims since the last recorded outcome."""
    look_up: bool = False
    """The idempotency store answered in a way that makes another send useless."""


class Action(StrEnum):
    SKIP = "skip"
    LEAVE = "leave"
    CHARGE = "charge"
    """Prepare, claim and send for the first time."""
    RESEND = "resend"
    """Claim and send the same key and bytes again."""
    LOOK_UP = "look_up"
    GIVE_UP = "give_up"
    """To `review`: too many claims ended without any outcome."""


@dataclass(frozen=True, slots=True)
class Decision:
    action: Action
    why: str


def decide(
    record: RecordView | None, now: datetime, limits: Limits, *, upstream_changed: bool = False
) -> Decision:
    """What a worker does with a record. `now` is the ledger's clock, in the same read.

    `upstream_changed`: the Stripe key in use is not the one that the stored request went
    out with, so that its idempotency store would not know the request.
    """
    if record is None:
        return Decision(Action.CHARGE, "no_record")
    if is_settled(record.state):
        return Decision(Action.SKIP, record.state)
    if record.lease_expires_at is not None and record.lease_expires_at > now:
        return Decision(Action.LEAVE, "leased")
    if record.next_attempt_at is not None and record.next_attempt_at > now:
        return Decision(Action.LEAVE, "not_due")
    if record.state is State.RESERVED:
        return Decision(Action.CHARGE, "reserved")
    return _decide_sent(record, now, limits, upstream_changed=upstream_changed)


def _decide_sent(
    record: RecordView, now: datetime, limits: Limits, *, upstream_changed: bool
) -> Decision:
    if record.claims >= limits.max_claims:
        return Decision(Action.GIVE_UP, "claims_without_outcome")
    first_sent_at = record.first_sent_at
    if first_sent_at is None or now - first_sent_at >= timedelta(seconds=limits.resend_window_s):
        return Decision(Action.LOOK_UP, "resend_window")
    if record.look_up:
        return Decision(Action.LOOK_UP, "idempotency_store")
    if upstream_changed:
        return Decision(Action.LOOK_UP, "upstream_key_changed")
    if record.unknowns >= limits.max_unknowns:
        return Decision(Action.LOOK_UP, "unknowns")
    return Decision(Action.RESEND, "sent")


def absence_is_proof(record: RecordView, now: datetime, limits: Limits) -> bool:
    """Whether not finding a charge at Stripe proves that there is none.

    Until then a request may still be running, through the worker or the vault.
    """
    return now >= absence_proof_at(record, limits)


def absence_proof_at(record: RecordView, limits: Limits) -> datetime:
    """The moment from which a failure or an absence at Stripe counts for this record."""
    assert record.last_sent_at is not None, "only a record that was sent is looked up"
    return record.last_sent_at + timedelta(seconds=limits.proof_of_absence_s)


def backoff_s(failures: int, limits: Limits, draw: float) -> float:
    """Seconds to wait before the next try: doubling from the base, capped, full jitter.

    `failures` counts from 1; `draw` is a random number in [0, 1).
    """
    exponent = min(max(failures, 1) - 1, 32)
    ceiling = min(limits.backoff_base_s * 2.0**exponent, limits.backoff_cap_s)
    return float(ceiling * draw)


def first_poll_s(state: State, limits: Limits) -> float | None:
    """Seconds until an intent that was left open is asked about; None: it is not open."""
    if state is State.PROCESSING:
        return limits.poll_processing_s
    if state is State.REQUIRES_ACTION:
        return limits.poll_action_s
    return None


def next_poll_s(state: State, polls: int, limits: Limits) -> float:
    """Seconds to the next look at an open intent; `polls` counts the looks so far."""
    if state is State.REQUIRES_ACTION:
        return limits.poll_action_s
    return float(
        min(limits.poll_processing_s * 2.0 ** min(polls, 32), limits.poll_processing_cap_s)
    )


class Disposition(StrEnum):
    """What a bridge does with a delivery now."""

    ACK = "ack"
    PUBLISH = "publish"
    """Hand the event to a worker, and keep the delivery."""
    WAIT = "wait"
    PARK = "park"
    """Let the delivery go round; the sweep owns the record."""
    DEAD_LETTER = "dead_letter"
    """The ledger holds this identity with other money fields: a payload conflict."""


@dataclass(frozen=True, slots=True)
class DeliveryView:
    """What a bridge knows of one held delivery. Ages in seconds of the bridge's own clock."""

    fingerprint: str
    age_s: float
    """Since this bridge took the delivery."""
    published_ago_s: float | None
    """Since it was last handed to a worker; None before the first time."""
    later_round: bool
    """The broker has delivered it before."""


@dataclass(frozen=True, slots=True)
class RecordStatus:
    """The columns that a bridge reads, in bulk."""

    state: State
    fingerprint: str | None
    event_id: str | None = None
    """Of a settled record's first event, as the ones below; None where there was none, or where
    it is gone."""
    description: str | None = None
    payment_method: str | None = None
    billing_run: str | None = None


def dispose(delivery: DeliveryView, record: RecordStatus | None, limits: Limits) -> Disposition:
    """What a bridge does with a delivery, given what the ledger says of its charge key."""
    if record is None:
        waited = delivery.published_ago_s
        if waited is None or waited >= limits.redispatch_after_s:
            return Disposition.PUBLISH
        return Disposition.WAIT
    if record.fingerprint is not None and record.fingerprint != delivery.fingerprint:
        return Disposition.DEAD_LETTER
    if is_settled(record.state):
        return Disposition.ACK
    if delivery.later_round or delivery.age_s >= limits.park_after_s:
        return Disposition.PARK
    return Disposition.WAIT
