"""Calls of the gateway to a scripted server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

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
"""Of calls that come to their end by it."""
AMPLE_S = 30.0
"""Of all others: on a busy machine they are still far from it."""


def agree() -> None:
    """A last check that has nothing against the write."""


class WritingClock:
    """A call's clock that stands until it is told to run, by its last check before the write or
    by the server: what came before that took no time."""

    def __init__(self) -> None:
        self._begun_s: float | None = None

    def begin(self, from_s: float = 0.0) -> None:
        """As a last check: agrees, and lets the time run."""
        self._begun_s = boot_clock_s() - from_s

    def __call__(self) -> float:
        return 0.0 if self._begun_s is None else boot_clock_s() - self._begun_s


@pytest.fixture
def writing_clock(monkeypatch: pytest.MonkeyPatch) -> WritingClock:
    clock = WritingClock()
    monkeypatch.setattr("tasks.deadline_http.boot_clock_s", clock)
    return clock


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
    within_s: float = AMPLE_S,
    before_write: Callable[[], None] = agree,
    request: StoredRequest = REQUEST,
) -> Reply:
    """One create by a gateway of its own."""
    with gateway_to(url) as gateway:
        return gateway.create(request, boot_clock_s() + within_s, before_write)
