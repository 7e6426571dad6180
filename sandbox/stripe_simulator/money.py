"""Which currencies and amounts are taken. Written from Stripe's tables, apart from `models`, so
that a mistake in our own rules is found here and not repeated."""

from __future__ import annotations

from sandbox.stripe_simulator.messages import StripeError

#: At most eight digits, Stripe's default.
MAX_AMOUNT = 99_999_999

_CURRENCIES = """
aed afn all amd ang aoa ars aud awg azn bam bbd bdt bgn bhd bif bmd bnd bob brl bsd btn bwp byn
bzd cad cdf chf clp cny cop crc cve czk djf dkk dop dzd egp etb eur fjd fkp gbp gel ghs gip gmd
gnf gtq gyd hkd hnl hrk htg huf idr ils inr isk jmd jod jpy kes kgs khr kmf krw kwd kyd kzt lak
lbp lkr lrd lsl mad mdl mga mkd mmk mnt mop mur mvr mwk mxn myr mzn nad ngn nio nok npr nzd omr
pab pen pgk php pkr pln pyg qar ron rsd rub rwf sar sbd scr sek sgd shp sle sos srd std szl thb
tjs tnd top try ttd twd tzs uah ugx usd uyu uzs vnd vuv wst xaf xcd xcg xof xpf yer zar zmw
"""
CURRENCIES = frozenset(_CURRENCIES.split())
THREE_DECIMAL = frozenset({"bhd", "jod", "kwd", "omr", "tnd"})

#: Smallest amounts in the currency's smallest unit, where Stripe names one.
MINIMUM_AMOUNT = {
    "aed": 200,
    "bgn": 100,
    "czk": 1500,
    "dkk": 250,
    "gbp": 30,
    "hkd": 400,
    "huf": 17500,
    "mxn": 1000,
    "myr": 200,
    "nok": 300,
    "pln": 200,
    "ron": 200,
    "sek": 300,
    "thb": 1000,
}
DEFAULT_MINIMUM_AMOUNT = 50


def checked_currency(text: str) -> str:
    """The currency in lower case. Raises StripeError (not executed) for one Stripe lacks."""
    currency = text.lower()
    if currency not in CURRENCIES:
        raise StripeError(400, f"Invalid currency: {text[:40]}", param="currency")
    return currency


def checked_amount(text: str) -> int:
    """The amount as an integer of at least 1. Raises StripeError (not executed)."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 18:
        raise StripeError(
            400,
            f"Invalid integer: {text[:40]}",
            code="parameter_invalid_integer",
            param="amount",
        )
    if int(text) < 1:
        raise StripeError(
            400,
            "This value must be greater than or equal to 1.",
            code="parameter_invalid_integer",
            param="amount",
        )
    return int(text)


def check_chargeable(amount: int, currency: str) -> None:
    """Bounds that the endpoint finds while executing: their refusal is saved with the key."""
    if amount > MAX_AMOUNT:
        raise StripeError(
            400,
            f"Amount must be no more than {MAX_AMOUNT}",
            code="amount_too_large",
            param="amount",
            executed=True,
        )
    minimum = MINIMUM_AMOUNT.get(currency, DEFAULT_MINIMUM_AMOUNT)
    if amount < minimum:
        raise StripeError(
            400,
            f"Amount must be at least {minimum} in the smallest unit of {currency}",
            code="amount_too_small",
            param="amount",
            executed=True,
        )
    if currency in THREE_DECIMAL and amount % 10:
        raise StripeError(
            400,
            f"Invalid amount: the last digit must be 0 in {currency}",
            code="invalid_charge_amount",
            param="amount",
            executed=True,
        )
