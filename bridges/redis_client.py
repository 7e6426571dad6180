"""Connections to Redis, with every option that matters given by name."""

from __future__ import annotations

from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from models.errors import ConfigurationError

CONNECT_TIMEOUT_S: Final = 2.0


def connect(url: str, timeout_s: float) -> Redis:
    """A client that reads bytes as they are and never sends anything twice by itself."""
    try:
        client = Redis.from_url(
            url,
            protocol=2,
            decode_responses=False,
            socket_timeout=timeout_s,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            client_name="chargebridge-bridge",
        )
    except ValueError:
        # Not repeated here: it may hold a password.
        raise ConfigurationError(
            "REDIS_URL: must be redis://, rediss:// or unix://, with a valid port and database"
        ) from None
    for command in ("XREADGROUP", "XAUTOCLAIM", "XRANGE"):
        client.set_response_callback(command, _as_it_is)
    return client


def _as_it_is(reply: Any, **_options: Any) -> Any:
    return reply
