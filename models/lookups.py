"""What Stripe's own lists say about a charge whose outcome is not known. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from models.outcomes import Outcome, OutcomeKind, kind_of_status

DEAD: Final = frozenset({"canceled", "failed"})
"""Statuses of intents and charges that nobody can pay any more."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The charge that is looked for."""

    charge_key: str
    epoch: int
    amount_cents: int
    currency: str


@dataclass(frozen=True, slots=True)
class SeenObject:
    """An intent, or a charge without one, as it was listed. Amounts in the smallest unit."""

    charge_key: str | None
    epoch: int | None
    status: str | None
    amount_cents: int | None
    currency: str | None
    payment_intent_id: str | None
    charge_id: str | None
    error_code: str | None = None
    decline_code: str | None = None

    @property
    def kind(self) -> OutcomeKind:
        kind = kind_of_status(self.status)
        codes = (self.error_code, self.decline_code)
        declined = kind is OutcomeKind.CARD_DECLINED and self.status != "canceled"
        if declined and "authentication_required" in codes:
            # The refused authentication leaves an intent that asks for another method.
            return OutcomeKind.REQUIRES_ACTION
        return kind

    @property
    def is_dead(self) -> bool:
        """Whether nobody can pay this object any more."""
        return self.status in DEAD

    @property
    def has_money(self) -> bool:
        """Whether it took money, or is about to: nobody can cancel that."""
        return self.kind in _MONEY


@dataclass(frozen=True, slots=True)
class Evidence:
    """How much the lists can prove. All of them were read to their last page."""

    proof_time: bool
    """Long enough after the last send that no request can still be running."""
    customer_exists: bool
    store_spoilt: bool
    """The idempotency store holds a failure or another request under the key."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What to write: an unknown outcome keeps the record `sent` until absence can be proof."""

    outcome: Outcome
    why: str
    double_charge: bool = False
    epoch: int | None = None
    """Of the object that was found; None: the record's own."""


_MONEY = (OutcomeKind.CHARGED, OutcomeKind.PROCESSING)


def judge(wanted: Wanted, listed: Sequence[SeenObject], evidence: Evidence) -> Finding:
    """What the complete lists of a customer's objects, newest first, say about one charge.

    A success is adopted at once, of whatever epoch: the money of this charge key was taken.
    A failure counts for its own epoch only, and like absence only once no request can still be
    running, since one that runs shows passing statuses.
    """
    seen = [item for item in listed if item.charge_key == wanted.charge_key]
    money = [item for item in seen if item.kind in _MONEY]
    if len(money) > 1:
        review = _review("two successes", money[0])
        return Finding(review.outcome, review.why, double_charge=True)
    if any(not _same_money(wanted, item) for item in money):
        return _review("another amount or currency", money[0])
    if money:
        return _adopt(money[0])
    own = [item for item in seen if item.epoch in (wanted.epoch, None)]
    if not evidence.proof_time:
        return Finding(Outcome(OutcomeKind.UNKNOWN, error_code="look_up_waits"), "not yet proof")
    if own:
        return _judge_failure(wanted, own[0])
    if not evidence.customer_exists:
        return _review("absent, and the customer is gone")
    if evidence.store_spoilt:
        return _review("absent, and the idempotency store answered otherwise")
    return Finding(Outcome(OutcomeKind.NOT_EXECUTED, error_code="absent"), "absent")


def _judge_failure(wanted: Wanted, item: SeenObject) -> Finding:
    if item.kind is OutcomeKind.UNRECOGNISED:
        return _review("unknown status", item)
    if not _same_money(wanted, item):
        return _review("another amount or currency", item)
    return _adopt(item)


def _same_money(wanted: Wanted, item: SeenObject) -> bool:
    return (item.amount_cents, item.currency) == (wanted.amount_cents, wanted.currency)


def _adopt(item: SeenObject) -> Finding:
    return Finding(_outcome(item.kind, item), f"found {item.status}", epoch=item.epoch)


def _review(why: str, item: SeenObject | None = None) -> Finding:
    if item is None:
        return Finding(Outcome(OutcomeKind.UNRECOGNISED, error_code="look_up_unclear"), why)
    return Finding(_outcome(OutcomeKind.UNRECOGNISED, item), why)


def _outcome(kind: OutcomeKind, item: SeenObject) -> Outcome:
    return Outcome(
        kind=kind,
        payment_intent_id=item.payment_intent_id,
        charge_id=item.charge_id,
        error_code=item.error_code,
        decline_code=item.decline_code,
    )
