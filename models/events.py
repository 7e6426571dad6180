"""The billing event: one JSON object that asks for one charge.

`decode_event` takes the bytes of a delivery, `event_from_json` an already parsed object (a task's
argument, a ledger row); both hold it to the same field rules, and both raise nothing but
EventRefused. Its detail names the field and the rule, never a value: it is stored and shown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NoReturn, cast

from models.errors import AmountRefused, DeadLetterReason, EventRefused
from models.keys import fingerprint
from models.money import DEFAULT_CURRENCY, MAX_AMOUNT_CENTS, check_amount, fold_currency
from models.strict_json import parse_strict_json

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_ID_CHARACTERS: Final = 255

STRIPE_DESCRIPTION_CHARACTERS: Final = 1000
STRIPE_METADATA_KEYS: Final = 50
STRIPE_METADATA_NAME_CHARACTERS: Final = 40
STRIPE_METADATA_VALUE_CHARACTERS: Final = 500

OWN_METADATA: Final = (
    "charge_key",
    "attempt_epoch",
    "customer_id",
    "billing_period",
    "billing_run",
)
"""What we write on every Stripe object; a producer's metadata of these names is dropped."""
MAX_EVENT_METADATA: Final = STRIPE_METADATA_KEYS - len(OWN_METADATA)

_ID_FORBIDDEN: Final = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # Cc and lone surrogates
_TEXT_FORBIDDEN: Final = re.compile("[\x00\ud800-\udfff]")  # what PostgreSQL cannot store
_STRIPE_CUSTOMER: Final = re.compile(r"cus_[A-Za-z0-9_]+")
_PAYMENT_METHOD: Final = re.compile(r"(?:pm|card|src)_[A-Za-z0-9_]+")


@dataclass(frozen=True, slots=True)
class BillingEvent:
    """One billing event that keeps every rule, defaults filled in, cut to Stripe's limits."""

    customer_id: str
    billing_period: str
    amount_cents: int
    """In the currency's smallest unit, as it is sent to Stripe."""
    stripe_customer_id: str
    currency: str
    """Lower-case."""
    payment_method: str | None
    billing_run: str
    description: str
    metadata: Mapping[str, str] = field(hash=False)
    """The producer's, without our own names; see `stripe_metadata`."""
    event_id: str | None

    @property
    def fingerprint(self) -> str:
        """The hash of the money fields: what must not differ between repeats."""
        return fingerprint(self.amount_cents, self.currency, self.stripe_customer_id)

    def to_json(self) -> dict[str, object]:
        """Return a JSON-safe object that `event_from_json` turns into an equal event."""
        return {
            "customer_id": self.customer_id,
            "billing_period": self.billing_period,
            "amount_cents": self.amount_cents,
            "stripe_customer_id": self.stripe_customer_id,
            "currency": self.currency,
            "payment_method": self.payment_method,
            "billing_run": self.billing_run,
            "description": self.description,
            "metadata": dict(self.metadata),
            "event_id": self.event_id,
        }


def decode_event(body: bytes, *, max_amount_cents: int = MAX_AMOUNT_CENTS) -> BillingEvent:
    """Return the billing event in a delivery's body; raise EventRefused if there is none.

    The body is one JSON object, as strict as `parse_strict_json` has it. Unknown fields are
    ignored, an optional field that is null counts as absent, and no number is coerced.
    `max_amount_cents` is in the smallest unit of the event's currency.
    """
    return event_from_json(parse_strict_json(body), max_amount_cents=max_amount_cents)


def event_from_json(value: object, *, max_amount_cents: int = MAX_AMOUNT_CENTS) -> BillingEvent:
    """Return the billing event in a parsed JSON value; raise EventRefused if it breaks a rule."""
    if not isinstance(value, dict):
        raise EventRefused(DeadLetterReason.INVALID_EVENT, "the body must be a JSON object")
    get = cast("dict[str, object]", value).get
    customer_id = check_id("customer_id", get("customer_id"))
    billing_period = check_id("billing_period", get("billing_period"))
    currency = _currency(get("currency"))
    payment_method = get("payment_method")
    billing_run = get("billing_run")
    event_id = get("event_id")
    return BillingEvent(
        customer_id=customer_id,
        billing_period=billing_period,
        amount_cents=_amount(get("amount_cents"), currency, max_amount_cents),
        stripe_customer_id=check_stripe_customer_id(get("stripe_customer_id")),
        currency=currency,
        payment_method=None if payment_method is None else check_payment_method(payment_method),
        billing_run=billing_period if billing_run is None else check_id("billing_run", billing_run),
        description=_description(get("description"), billing_period),
        metadata=_metadata(get("metadata")),
        event_id=None if event_id is None else _text("event_id", event_id),
    )


def stripe_metadata(event: BillingEvent, charge_key: str, epoch: int) -> dict[str, str]:
    """Return the metadata for a Stripe object: ours, by which it is found again, and the event's.

    It keeps Stripe's limits for names, values and their number whatever the producer sent.
    """
    return {
        **event.metadata,
        "charge_key": charge_key,
        "attempt_epoch": str(epoch),
        "customer_id": event.customer_id,
        "billing_period": event.billing_period,
        "billing_run": event.billing_run,
    }


def check_id(name: str, value: object) -> str:
    """Return the value of an identity field unchanged; raise EventRefused if it breaks the rule.

    Opaque otherwise. A blank at an end or an invisible control character would be another
    customer to the ledger and the same one to its reader.
    """
    if not isinstance(value, str):
        _refuse(name, "must be a string")
    if not 1 <= len(value) <= MAX_ID_CHARACTERS:
        _refuse(name, f"must be 1 to {MAX_ID_CHARACTERS} characters long")
    if _ID_FORBIDDEN.search(value) is not None:
        _refuse(name, "must not contain control characters or lone surrogates")
    if value[0].isspace() or value[-1].isspace():
        _refuse(name, "must not begin or end with a blank")
    return value


def check_stripe_customer_id(value: object) -> str:
    """Return a Stripe customer id unchanged; raise EventRefused if it cannot be one."""
    return _pattern("stripe_customer_id", value, _STRIPE_CUSTOMER, "cus_")


def check_payment_method(value: object) -> str:
    """Return a Stripe payment method id unchanged; raise EventRefused if it cannot be one."""
    return _pattern("payment_method", value, _PAYMENT_METHOD, "pm_, card_ or src_")


def _refuse(name: str, rule: str) -> NoReturn:
    raise EventRefused(DeadLetterReason.INVALID_EVENT, f"{name} {rule}")


def _pattern(name: str, value: object, pattern: re.Pattern[str], prefix: str) -> str:
    if not isinstance(value, str):
        _refuse(name, "must be a string")
    if len(value) > MAX_ID_CHARACTERS or pattern.fullmatch(value) is None:
        _refuse(name, f"must be {prefix} and word characters, at most {MAX_ID_CHARACTERS} in all")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        _refuse(name, "must be a string")
    if _TEXT_FORBIDDEN.search(value) is not None:
        _refuse(name, "must not contain NUL or lone surrogates")
    return value


def _currency(value: object) -> str:
    if value is None:
        return DEFAULT_CURRENCY
    if not isinstance(value, str):
        _refuse("currency", "must be a string")
    try:
        return fold_currency(value)
    except AmountRefused as refused:
        raise EventRefused(DeadLetterReason.INVALID_EVENT, str(refused)) from None


def _amount(value: object, currency: str, maximum: int) -> int:
    amount_cents = cast("int", value)  # check_amount refuses every other type
    try:
        check_amount(amount_cents, currency, maximum)
    except AmountRefused as refused:
        raise EventRefused(DeadLetterReason.INVALID_EVENT, str(refused)) from None
    return amount_cents


def _description(value: object, billing_period: str) -> str:
    if value is not None:
        cut = _text("description", value)[:STRIPE_DESCRIPTION_CHARACTERS]
        # Stripe takes an empty text for an attempt to unset the field, and refuses that.
        if cut.strip():
            return cut
    return f"Usage billing for {billing_period}"


def _metadata(value: object) -> dict[str, str]:
    """Cut a producer's metadata to what Stripe takes beside our own, the same way every time.

    In the order of the names: long names and values are shortened, of names that become equal
    the first stays, and what is beyond the limit is left out. So are empty names and values and
    names with square brackets, which Stripe's form encoding cannot carry.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        _refuse("metadata", "must be a flat object of strings")
    for name, text in value.items():
        if not isinstance(name, str) or not isinstance(text, str):
            _refuse("metadata", "must be a flat object of strings")
        if _TEXT_FORBIDDEN.search(name) or _TEXT_FORBIDDEN.search(text):
            _refuse("metadata", "must not contain NUL or lone surrogates")
    kept: dict[str, str] = {}
    for name in sorted(value):
        if len(kept) == MAX_EVENT_METADATA:
            break
        if name in OWN_METADATA or not name or not value[name] or "[" in name or "]" in name:
            continue
        kept.setdefault(
            name[:STRIPE_METADATA_NAME_CHARACTERS], value[name][:STRIPE_METADATA_VALUE_CHARACTERS]
        )
    return kept
