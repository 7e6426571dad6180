"""Money: which currencies and amounts Stripe takes, caps, and amounts for people.

Amounts are whole numbers of the currency's smallest unit, exactly as they go over Stripe's wire,
called `amount_cents` in every currency. They are never rescaled: 500 in `jpy` is 500 yen.
No floating point anywhere.
"""

from __future__ import annotations

from typing import Final

from models.errors import AmountRefused


def _codes(text: str) -> frozenset[str]:
    return frozenset(text.split())


DEFAULT_CURRENCY: Final = "usd"

MAX_AMOUNT_CENTS: Final = 99_999_999
"""Largest single charge by default: the eight digits that every payment method allows."""

CAP_PERCENT: Final = 110
"""What a billing run may spend, in percent of its expected total."""

MAX_TOTAL_CENTS: Final = (2**63 - 1) * 100 // CAP_PERCENT
"""Largest expected total: its cap still fits a BIGINT."""

ZERO_DECIMAL: Final = _codes("bif clp djf gnf jpy kmf krw mga pyg rwf vnd vuv xaf xof xpf")
"""The smallest unit is the whole unit."""

THREE_DECIMAL: Final = _codes("bhd jod kwd omr tnd")
"""Thousandths, of which the card networks want the last digit to be 0."""

WHOLE_UNITS_ONLY: Final = _codes("isk ugx")
"""Without a smaller unit in real life, yet sent as hundredths, of which the last two are 00."""

# What Stripe names when it refuses an unknown currency. A few have been withdrawn since; Stripe
# itself refuses those with an answer of its own, which is then kept with the billing record.
_TWO_DECIMAL: Final = _codes(
    """
    aed afn all amd ang aoa ars aud awg azn bam bbd bdt bgn bmd bnd bob brl bsd btn bwp byn bzd
    cad cdf chf cny cop crc cve czk dkk dop dzd eek egp etb eur fjd fkp gbp gel ghs gip gmd gtq
    gyd hkd hnl hrk htg huf idr ils inr jmd kes kgs khr kyd kzt lak lbp lkr lrd lsl ltl lvl mad
    mdl mkd mmk mnt mop mro mur mvr mwk mxn myr mzn nad ngn nio nok npr nzd pab pen pgk php pkr
    pln qar ron rsd rub sar sbd scr sek sgd shp sle sll sos srd std svc szl thb tjs top try ttd
    twd tzs uah usd uyu uzs vef wst xcd xcg yer zar zmw
    """
)

CURRENCIES: Final = ZERO_DECIMAL | THREE_DECIMAL | WHOLE_UNITS_ONLY | _TWO_DECIMAL
"""Every currency that Stripe knows, lower-case."""

_DIGITS: Final = {
    **dict.fromkeys(_TWO_DECIMAL | WHOLE_UNITS_ONLY, 2),
    **dict.fromkeys(ZERO_DECIMAL, 0),
    **dict.fromkeys(THREE_DECIMAL, 3),
}
_STEP: Final = {**dict.fromkeys(THREE_DECIMAL, 10), **dict.fromkeys(WHOLE_UNITS_ONLY, 100)}


def fold_currency(currency: str) -> str:
    """Return the currency in lower case; raise AmountRefused unless Stripe knows it."""
    # ASCII first: lower() turns the Kelvin sign into a "k".
    folded = currency.lower() if currency.isascii() else ""
    if folded not in CURRENCIES:
        raise AmountRefused("currency must be a three-letter code that Stripe knows")
    return folded


def check_amount(amount_cents: int, currency: str, maximum: int = MAX_AMOUNT_CENTS) -> None:
    """Raise AmountRefused unless Stripe would take this amount in this (lower-case) currency.

    `maximum` is in the currency's smallest unit. Stripe's minimum (about half a US dollar in the
    settlement currency) depends on the account and the day's rates, so it is left to Stripe.
    """
    if type(amount_cents) is not int:  # a bool is an int to Python, and is not an amount
        raise AmountRefused("amount_cents must be an integer")
    if not 1 <= amount_cents <= maximum:
        raise AmountRefused(f"amount_cents must be from 1 to {maximum}")
    if currency not in CURRENCIES:
        raise AmountRefused("currency must be a three-letter code that Stripe knows")
    step = _STEP.get(currency, 1)
    if amount_cents % step:
        raise AmountRefused(f"amount_cents must be a multiple of {step} in {currency}")


def cap_cents(expected_total_cents: int) -> int:
    """Return what a billing run may spend: the expected total and a tenth, rounded down.

    Raises AmountRefused for a negative total, or one whose cap the ledger could not hold.
    """
    if type(expected_total_cents) is not int or not 0 <= expected_total_cents <= MAX_TOTAL_CENTS:
        raise AmountRefused(f"an expected total must be an integer from 0 to {MAX_TOTAL_CENTS}")
    return expected_total_cents * CAP_PERCENT // 100


def format_amount(amount_cents: int, currency: str) -> str:
    """Return an amount for people to read: `1,234.50 USD`, `500 JPY`, `1.230 KWD`.

    Negative amounts are differences. Raises AmountRefused for an unknown currency.
    """
    code = fold_currency(currency)
    digits = _DIGITS[code]
    sign = "-" if amount_cents < 0 else ""
    whole, rest = divmod(abs(amount_cents), 10**digits)
    fraction = f".{rest:0{digits}d}" if digits else ""
    return f"{sign}{whole:,}{fraction} {code.upper()}"
