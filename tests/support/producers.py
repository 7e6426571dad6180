"""Producers, as any other service would write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import redis
import urllib3

from sandbox.health import http


def body_of(event: Mapping[str, Any] | bytes) -> bytes:
    return event if isinstance(event, bytes) else json.dumps(event).encode()


def billing_event(
    customer: str = "cust_1", period: str = "2026-09", **fields: Any
) -> dict[str, Any]:
    """A valid billing event of 25.00 USD; fields override."""
    return {
        "customer_id": customer,
        "billing_period": period,
        "amount_cents": 2500,
        "stripe_customer_id": f"cus_{customer}",
        **fields,
    }


def publish_nsq(settings: Mapping[str, str], event: Mapping[str, Any] | bytes) -> None:
    """Publishes one message (bytes: as they are) and waits for nsqd's OK."""
    address, topic = settings["NSQD_HTTP_ADDRESS"], settings["NSQ_TOPIC"]
    reply = http.request("POST", f"http://{address}/pub?topic={quote(topic)}", body=body_of(event))
    if reply.status != 200:
        raise urllib3.exceptions.HTTPError(f"nsqd refused: {reply.status}")


def publish_redis(settings: Mapping[str, str], event: Mapping[str, Any] | bytes) -> str:
    """Adds one entry to the stream; returns its id."""
    with redis.Redis.from_url(settings["REDIS_URL"]) as client:
        entry = client.xadd(settings["REDIS_STREAM"], {b"payload": body_of(event)})
    return bytes(entry).decode()
