"""Publishes expected events that nobody has seen, in their original bytes, to a broker."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import redis
import urllib3
from redis.backoff import NoBackoff
from redis.retry import Retry

from models.errors import ChargebridgeError

if TYPE_CHECKING:
    from models.settings import Settings

BATCH: Final = 100
MAX_BATCH_BYTES: Final = 1024 * 1024
"""nsqd takes five times as much by default."""
ANSWER_S: Final = 10.0

Publish = Callable[[Sequence[bytes]], None]


def republish(settings: Settings, broker: str, bodies: Iterable[bytes]) -> int:
    """Publish these bodies to `nsq` or `redis`; returns how many.

    Raises ChargebridgeError with the number that had been published for certain: what was
    published twice is recognised by its charge key.
    """
    publish = _to_nsq(settings) if broker == "nsq" else _to_redis(settings)
    done = 0
    for batch in _batches(bodies):
        try:
            publish(batch)
        except (urllib3.exceptions.HTTPError, redis.RedisError, OSError) as error:
            raise ChargebridgeError(
                f"{broker} did not take an event ({type(error).__name__}); {done} were "
                "republished, run it again"
            ) from None
        done += len(batch)
    return done


def _batches(bodies: Iterable[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for body in bodies:
        if batch and (len(batch) == BATCH or size + len(body) > MAX_BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(body)
        size += len(body)
    if batch:
        yield batch


def _to_nsq(settings: Settings) -> Publish:
    settings.require("nsqd_http_address")
    base = settings.nsqd_http_address.rstrip("/")
    base = base if "://" in base else f"http://{base}"
    url = f"{base}/mpub?binary=true&topic={quote(settings.nsq_topic, safe='')}"
    pool = urllib3.PoolManager(retries=False, timeout=ANSWER_S)

    def publish(bodies: Sequence[bytes]) -> None:
        parts = [struct.pack(">l", len(bodies))]
        parts += [struct.pack(">l", len(body)) + body for body in bodies]
        reply = pool.request("POST", url, body=b"".join(parts))
        if reply.status != 200:
            raise urllib3.exceptions.HTTPError(f"nsqd answered {reply.status}")

    return publish


def _to_redis(settings: Settings) -> Publish:
    settings.require("redis_url")
    client: Any = redis.Redis.from_url(
        settings.redis_url,
        socket_timeout=ANSWER_S,
        socket_connect_timeout=ANSWER_S,
        retry=Retry(NoBackoff(), 0),
    )

    def publish(bodies: Sequence[bytes]) -> None:
        pipeline = client.pipeline(transaction=True)
        for body in bodies:
            pipeline.xadd(settings.redis_stream, {settings.redis_payload_field: body})
        pipeline.execute()

    return publish
