"""What three stories of one charge key come to, over all of their combinations."""

from __future__ import annotations

from itertools import product

import pytest

from models.reconciling import HARMLESS, LedgerSide, Money, StripeSide, Verdict, compare
from models.states import State

TEN = Money(1000, "usd")
NINE = Money(900, "usd")
NOTHING = StripeSide()
PAID = StripeSide(successes=1, money=TEN)
OPEN = StripeSide(open_objects=1)


def verdict(
    expected: Money | None, ledger: tuple[State, Money | None] | None, stripe: StripeSide
) -> Verdict:
    side = None if ledger is None else LedgerSide(*ledger)
    return compare(expected, side, stripe, expecting=True)


@pytest.mark.parametrize(
    ("expected", "ledger", "stripe", "is_"),
    [
        (TEN, (State.CHARGED, TEN), PAID, Verdict.FOUND),
        (TEN, None, NOTHING, Verdict.MISSING),
        (TEN, None, PAID, Verdict.LOST),
        (None, None, PAID, Verdict.LOST),
        (TEN, None, OPEN, Verdict.OPEN_AT_STRIPE),
        (TEN, (State.SENT, TEN), PAID, Verdict.LOST),
        (TEN, (State.CARD_DECLINED, TEN), PAID, Verdict.LOST),
        (TEN, (State.CHARGED, TEN), NOTHING, Verdict.NOT_AT_STRIPE),
        (None, (State.CHARGED, TEN), PAID, Verdict.EXTRA),
        (NINE, (State.CHARGED, TEN), PAID, Verdict.WRONG_AMOUNT),
        (TEN, (State.CHARGED, NINE), PAID, Verdict.WRONG_AMOUNT),
        (Money(1000, "eur"), (State.CHARGED, TEN), PAID, Verdict.WRONG_AMOUNT),
        (TEN, (State.SENT, TEN), NOTHING, Verdict.UNSETTLED),
        (TEN, (State.RESERVED, TEN), OPEN, Verdict.UNSETTLED),
        (TEN, (State.PROCESSING, TEN), OPEN, Verdict.PROCESSING),
        (TEN, (State.REVIEW, TEN), PAID, Verdict.REVIEW),
        (TEN, (State.VOIDED, None), NOTHING, Verdict.NOT_CHARGED),
        (TEN, (State.CARD_DECLINED, TEN), OPEN, Verdict.NOT_CHARGED),
        (TEN, (State.CHARGED, TEN), StripeSide(2, 0, TEN), Verdict.DOUBLE_CHARGE),
    ],
)
def test_a_charge_key_has_one_verdict(
    expected: Money | None,
    ledger: tuple[State, Money | None] | None,
    stripe: StripeSide,
    is_: Verdict,
) -> None:
    assert verdict(expected, ledger, stripe) is is_


def test_only_what_was_charged_once_or_settled_without_money_is_harmless() -> None:
    sides = [None, *((state, TEN) for state in State)]
    for expected, ledger, stripe in product([None, TEN, NINE], sides, [NOTHING, PAID, OPEN]):
        found = verdict(expected, ledger, stripe)
        if found not in HARMLESS:
            continue
        assert ledger is not None
        state = ledger[0]
        if found is Verdict.FOUND:
            assert (state, stripe, expected) == (State.CHARGED, PAID, TEN)
        else:
            assert stripe.successes == 0
            assert state not in (State.CHARGED, State.SENT, State.RESERVED, State.PROCESSING)


def test_without_an_expectation_nothing_is_extra() -> None:
    ledger = LedgerSide(State.CHARGED, TEN)
    assert compare(None, ledger, PAID, expecting=False) is Verdict.FOUND
