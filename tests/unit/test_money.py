"""Currencies, amounts, caps and how amounts are shown."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.errors import AmountRefused
from models.money import (
    CURRENCIES,
    MAX_AMOUNT_CENTS,
    MAX_TOTAL_CENTS,
    THREE_DECIMAL,
    WHOLE_UNITS_ONLY,
    ZERO_DECIMAL,
    cap_cents,
    check_amount,
    fold_currency,
    format_amount,
)


def accepts(amount_cents: int, currency: str, maximum: int = MAX_AMOUNT_CENTS) -> bool:
    try:
        check_amount(amount_cents, currency, maximum)
    except AmountRefused:
        return False
    return True


def test_the_currency_table_is_complete_and_in_order() -> None:
    assert {"usd", "eur", "gbp", "jpy", "kwd", "isk", "ugx", "huf", "twd", "xcg"} <= CURRENCIES
    assert all(len(code) == 3 and code.isascii() and code.islower() for code in CURRENCIES)
    assert len(CURRENCIES) == 150
    assert {
        *(ZERO_DECIMAL & THREE_DECIMAL),
        *(ZERO_DECIMAL & WHOLE_UNITS_ONLY),
        *(THREE_DECIMAL & WHOLE_UNITS_ONLY),
    } == set()


@pytest.mark.parametrize("written", ["usd", "USD", "Usd"])
def test_a_currency_is_case_folded(written: str) -> None:
    assert fold_currency(written) == "usd"


@pytest.mark.parametrize(
    "written", ["", "zzz", "us", "usdc", " usd", "usd ", "usd\n", "\u212awd", "\uff55\uff53\uff44"]
)
def test_what_stripe_does_not_know_is_no_currency(written: str) -> None:
    with pytest.raises(AmountRefused, match="currency"):
        fold_currency(written)


@pytest.mark.parametrize(
    ("amount_cents", "currency", "accepted"),
    [
        (1, "usd", True),
        (0, "usd", False),
        (-500, "usd", False),
        (MAX_AMOUNT_CENTS, "usd", True),
        (MAX_AMOUNT_CENTS + 1, "usd", False),
        (500, "jpy", True),
        (501, "jpy", True),
        (1230, "kwd", True),
        (1234, "kwd", False),
        (5, "kwd", False),
        (500, "isk", True),
        (550, "isk", False),
        (100, "ugx", True),
        (99, "ugx", False),
        # whole units only when paid out; charges may have two decimals
        (1045, "huf", True),
        (80045, "twd", True),
        (500, "zzz", False),
        (500, "USD", False),
    ],
)
def test_an_amount_must_fit_its_currency(amount_cents: int, currency: str, accepted: bool) -> None:
    assert accepts(amount_cents, currency) is accepted


@pytest.mark.parametrize("amount", [True, 5.0, "500", None])
def test_only_an_integer_is_an_amount(amount: object) -> None:
    with pytest.raises(AmountRefused, match="integer"):
        check_amount(amount, "usd")  # type: ignore[arg-type]


def test_the_maximum_can_be_raised_beyond_32_bits() -> None:
    assert accepts(2**31, "usd", maximum=999_999_999_999)
    assert not accepts(10**12, "usd", maximum=999_999_999_999)


@pytest.mark.parametrize(
    ("expected", "cap"),
    [(0, 0), (1, 1), (9, 9), (10, 11), (19, 20), (100_000, 110_000), (10**12, 11 * 10**11)],
)
def test_a_cap_is_a_tenth_above_rounded_down(expected: int, cap: int) -> None:
    assert cap_cents(expected) == cap


@given(st.integers(0, MAX_TOTAL_CENTS))
@settings(deadline=None)
def test_a_cap_is_exact_for_any_total_and_fits_the_ledger(expected: int) -> None:
    cap = cap_cents(expected)
    assert cap * 10 <= expected * 11 < (cap + 1) * 10
    assert cap < 2**63


@pytest.mark.parametrize("expected", [-1, MAX_TOTAL_CENTS + 1, 10.0, True])
def test_a_total_that_has_no_cap_is_refused(expected: int) -> None:
    with pytest.raises(AmountRefused, match="expected total"):
        cap_cents(expected)


@pytest.mark.parametrize(
    ("amount_cents", "currency", "shown"),
    [
        (0, "usd", "0.00 USD"),
        (5, "usd", "0.05 USD"),
        (123_456_789, "eur", "1,234,567.89 EUR"),
        (-250, "usd", "-2.50 USD"),
        (500, "jpy", "500 JPY"),
        (1230, "kwd", "1.230 KWD"),
        (500, "isk", "5.00 ISK"),
        (99, "USD", "0.99 USD"),
    ],
)
def test_amounts_are_shown_in_whole_units(amount_cents: int, currency: str, shown: str) -> None:
    assert format_amount(amount_cents, currency) == shown


def test_an_unknown_currency_is_not_shown_with_a_guess() -> None:
    with pytest.raises(AmountRefused):
        format_amount(100, "zzz")
