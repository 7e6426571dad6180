"""The request for one charge: built once from the event, stored, and encoded the same for ever."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote_plus

from models.events import stripe_metadata
from models.keys import idempotency_key
from models.records import StoredRequest

if TYPE_CHECKING:
    from models.events import BillingEvent

API_VERSION: Final = "2026-10-28.endive"
"""Stripe's version that new requests are written for; a resend goes out with its own."""
PAYMENT_INTENTS: Final = "payment_intents"
CHARGES: Final = "charges"
ENDPOINTS: Final = (PAYMENT_INTENTS, CHARGES)
KEY_ID_LENGTH: Final = 16


def upstream_key_id(api_key: str) -> str:
    """A short digest that tells two Stripe keys apart without giving one away."""
    return sha256(f"stripe-key:{api_key}".encode()).hexdigest()[:KEY_ID_LENGTH]


def build_request(
    event: BillingEvent,
    charge_key: str,
    *,
    epoch: int,
    payment_method: str | None,
    key_id: str,
    namespace: str,
    endpoint: str = PAYMENT_INTENTS,
) -> StoredRequest:
    """The request of one attempt epoch, as it is stored with the attempt.

    Without a payment method none is sent, so that what becomes of it is Stripe's own answer.
    """
    params: dict[str, Any] = {
        "amount": event.amount_cents,
        "currency": event.currency,
        "customer": event.stripe_customer_id,
        "description": event.description,
        "metadata": stripe_metadata(event, charge_key, epoch),
    }
    if endpoint == PAYMENT_INTENTS:
        params |= {"confirm": True, "off_session": True}
    if payment_method is not None:
        params["payment_method" if endpoint == PAYMENT_INTENTS else "source"] = payment_method
    return StoredRequest(
        endpoint=endpoint,
        params=params,
        api_version=API_VERSION,
        upstream_key_id=key_id,
        idempotency_key=idempotency_key(event.customer_id, event.billing_period, epoch, namespace),
    )


def encode_form(params: Mapping[str, Any]) -> bytes:
    """Stripe's form encoding of nested parameters, in the order of their names.

    The order is ours and not the mapping's: JSONB gives names back in another order than they
    were stored in, and the same request must be the same bytes on every try.
    """
    pairs = sorted(_flatten("", params))
    return "&".join(f"{_name(name)}={quote_plus(value)}" for name, value in pairs).encode()


def _flatten(prefix: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flatten(f"{prefix}[{name}]" if prefix else str(name), inner)
    elif isinstance(value, bool):
        yield prefix, "true" if value else "false"
    elif isinstance(value, int | str):
        yield prefix, str(value)
    else:
        # A float would be money in the wrong unit, a null an attempt to unset a field.
        raise TypeError(f"a request parameter cannot be a {type(value).__name__}")


def _name(name: str) -> str:
    return quote_plus(name, safe="[]")
