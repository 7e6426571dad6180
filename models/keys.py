"""The keys that name a charge. Pure: the same event gives the same key, on every road.

Nothing that a broker adds may enter a key: no attempts counter, message or entry id, delivery
count, consumer or connection name, address, time or random value. Each of those changes when a
delivery comes round again, and a changed key is a second charge.
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Final

from models.errors import ConfigurationError

DEFAULT_NAMESPACE: Final = "stripe-billing"
"""One for all sources: the same event on NSQ and on the stream is one charge."""

KEY_LENGTH: Final = 32
"""Characters (lower-case hex) of a charge key, an idempotency key and a fingerprint."""

_NAMESPACE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_namespace(namespace: str) -> str:
    """Return the namespace unchanged; raise ConfigurationError for one that could blur two keys.

    The namespace enters a key as it is. A colon or a percent sign in it could make one
    namespace's recharge look like another one's first attempt.
    """
    if _NAMESPACE.fullmatch(namespace) is None:
        raise ConfigurationError(
            "the key namespace must be 1 to 64 letters, digits, dots, dashes or underscores"
        )
    return namespace


def charge_key(customer_id: str, billing_period: str, namespace: str = DEFAULT_NAMESPACE) -> str:
    """Return the key that names the charge for ever, over all attempt epochs (32 hex digits).

    `%` and `:` inside the two ids are percent-encoded, so that ("a:b", "c") and ("a", "b:c")
    are two charges; any other id enters as it is.
    """
    return _digest(_identity(customer_id, billing_period, namespace))


def idempotency_key(
    customer_id: str, billing_period: str, epoch: int, namespace: str = DEFAULT_NAMESPACE
) -> str:
    """Return the key for Stripe's header in this attempt epoch (32 hex digits).

    Epoch 0 is the charge key itself; each approved recharge has a key of its own, because Stripe
    would answer the old one with the saved decline. Raises ValueError for a negative epoch.
    """
    if epoch < 0:
        raise ValueError("an attempt epoch is 0 or more")
    identity = _identity(customer_id, billing_period, namespace)
    return _digest(identity if epoch == 0 else f"{identity}:recharge-{epoch}")


def fingerprint(amount_cents: int, currency: str, stripe_customer_id: str) -> str:
    """Return the hash of the money fields, after defaults and case folding (32 hex digits).

    Same charge key and same fingerprint: a repeat. Same charge key, another fingerprint: a
    conflict, and the first event stands.
    """
    return _digest(f"{amount_cents:d}:{_quote(currency)}:{_quote(stripe_customer_id)}")


def _identity(customer_id: str, billing_period: str, namespace: str) -> str:
    return f"{_quote(customer_id)}:{_quote(billing_period)}:{namespace}"


def _quote(text: str) -> str:
    # `%` first: the other way round, the percent sign of `%3A` would be encoded again.
    return text.replace("%", "%25").replace(":", "%3A")


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:KEY_LENGTH]
