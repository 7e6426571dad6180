"""Billing events as a producer writes them, field by field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from models.errors import EventRefused
from models.events import BillingEvent, decode_event

PLAIN: dict[str, Any] = {
    "customer_id": "cust_100",
    "billing_period": "2026-Q3",
    "amount_cents": 2500,
    "stripe_customer_id": "cus_T100",
}
"""The fields that must be there."""


def decode(**changes: object) -> BillingEvent:
    """A plain event with these fields in place of its own."""
    return decode_event(json.dumps({**PLAIN, **changes}).encode())


def refusal(**changes: object) -> EventRefused:
    """Why such an event is refused; fails when it is not."""
    with pytest.raises(EventRefused) as caught:
        decode(**changes)
    return caught.value
