"""Holds one charge key's three stories against each other: expected, ledger, Stripe. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from models.states import UNSETTLED, State


class Verdict(StrEnum):
    """What a line of a reconciliation comes to."""

    FOUND = "found"
    """Charged once, as the ledger says and (if it was given) the expectation."""
    MISSING = "missing"
    """Expected; neither the ledger nor Stripe knows of it."""
    LOST = "lost"
    """Stripe took the money, the ledger does not say so."""
    EXTRA = "extra"
    """Charged, and not expected."""
    WRONG_AMOUNT = "wrong_amount"
    """Another amount or currency than was expected, or than the ledger says."""
    DOUBLE_CHARGE = "double_charge"
    """More than one success at Stripe. Must never be."""
    NOT_AT_STRIPE = "not_at_stripe"
    """The ledger says charged, Stripe shows no money."""
    OPEN_AT_STRIPE = "open_at_stripe"
    """Not in the ledger, and an intent at Stripe can still be paid."""
    UNSETTLED = "unsettled"
    PROCESSING = "processing"
    REVIEW = "review"
    NOT_CHARGED = "not_charged"
    """Settled without money: declined, rejected, blocked, voided, or waiting for the customer."""


HARMLESS: Final = frozenset({Verdict.FOUND, Verdict.NOT_CHARGED})
"""Verdicts that do not keep a run from being closed."""


@dataclass(frozen=True, slots=True)
class Money:
    """An amount in the currency's smallest unit."""

    amount_cents: int
    currency: str


@dataclass(frozen=True, slots=True)
class LedgerSide:
    state: State
    money: Money | None
    """None on a tombstone."""


@dataclass(frozen=True, slots=True)
class StripeSide:
    """Objects of one charge key. `money` is that of the first success."""

    successes: int = 0
    open_objects: int = 0
    """Neither paid nor dead: these can still take money."""
    money: Money | None = None


def compare(
    expected: Money | None, ledger: LedgerSide | None, stripe: StripeSide, *, expecting: bool
) -> Verdict:
    """The verdict on one charge key. `expecting`: there is a list of what was expected."""
    if stripe.successes > 1:
        return Verdict.DOUBLE_CHARGE
    if ledger is None:
        return _without_record(stripe)
    if stripe.successes and ledger.state not in (State.CHARGED, State.REVIEW):
        return Verdict.LOST
    amounts = {
        money
        for money in (expected, ledger.money, stripe.money if stripe.successes else None)
        if money is not None
    }
    if len(amounts) > 1:
        return Verdict.WRONG_AMOUNT
    return _by_state(ledger.state, stripe, unexpected=expecting and expected is None)


def _without_record(stripe: StripeSide) -> Verdict:
    if stripe.successes:
        return Verdict.LOST
    return Verdict.OPEN_AT_STRIPE if stripe.open_objects else Verdict.MISSING


def _by_state(state: State, stripe: StripeSide, *, unexpected: bool) -> Verdict:
    if state in UNSETTLED:
        return Verdict.UNSETTLED
    if state is State.REVIEW:
        return Verdict.REVIEW
    if state is State.PROCESSING:
        return Verdict.EXTRA if unexpected else Verdict.PROCESSING
    if state is State.CHARGED:
        if not stripe.successes:
            return Verdict.NOT_AT_STRIPE
        return Verdict.EXTRA if unexpected else Verdict.FOUND
    return Verdict.NOT_CHARGED
