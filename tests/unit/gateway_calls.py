"""Calls of the gateway to a scripted server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from models.ledger import boot_clock_s
from models.outcomes import Reply
from models.records import StoredRequest
from tasks.stripe_gateway import StripeGateway

KEY = "sk_test_secret0123456789"
INTENT = {"id": "pi_1", "object": "payment_intent", "status": "succeeded", "latest_charge": "ch_1"}
REQUEST = StoredRequest(
    endpoint="payment_intents",
    params={"amount": 2500, "confirm": True, "metadata": {"b": "2", "a": "ü&="}},
    api_version="2026-10-28.endive",
    upstream_key_id="key-1",
    idempotency_key="0123456789abcdef0123456789abcdef",
)
DEADLINE_S = 0.6


def agree() -> None:
    """A last check that has nothing against the write."""


@contextmanager
def gateway_to(url: str) -> Iterator[StripeGateway]:
    gateway = StripeGateway(KEY, url)
    try:
        yield gateway
    finally:
        gateway.close()


def create(
    url: str,
    *,
    within_s: float = 5.0,
    before_write: Callable[[], None] = agree,
    request: StoredRequest = REQUEST,
) -> Reply:
    """One create by a gateway of its own."""
    with gateway_to(url) as gateway:
        return gateway.create(request, boot_clock_s() + within_s, before_write)
