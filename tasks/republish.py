"""Publishes expected events that nobody has seen, in their original bytes, to a broker."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import redis
import urllib3
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.exceptions import RedisClusterException
from redis.retry import Retry
from redis.sentinel import Sentinel

from models.errors import ChargebridgeError, ConfigurationError
from models.redis_urls import CLUSTER, read_redis_url

if TYPE_CHECKING:
    from models.settings import Settings

BATCH: Final = 100
MAX_BATCH_BYTES: Final = 1024 * 1024
"""nsqd takes five times as much by default."""
ANSWER_S: Final = 10.0
UNAVAILABLE: Final = (
    urllib3.exceptions.HTTPError,
    redis.RedisError,
    RedisClusterException,
    OSError,
)

Publish = Callable[[Sequence[bytes]], None]


def republish(settings: Settings, broker: str, bodies: Iterable[bytes]) -> int:
    """Publish these bodies to `nsq` or `redis`; returns how many.

    Raises ChargebridgeError with the number that had been published for certain: what was
    published twice is recognised by its charge key.
    """
    done = 0
    try:
        publish = _to_nsq(settings) if broker == "nsq" else _to_redis(settings)
        for batch in _batches(bodies):
            publish(batch)
            done += len(batch)
    except UNAVAILABLE as error:
        raise ChargebridgeError(
            f"{broker} did not take an event ({type(error).__name__}); {done} were "
            "republished, run it again"
        ) from None
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
    named = [part.strip() for part in settings.nsqd_http_address.split(",") if part.strip()]
    bases = [base if "://" in base else f"http://{base}" for base in named]
    path = f"/mpub?binary=true&topic={quote(settings.nsq_topic, safe='')}"
    pool = urllib3.PoolManager(retries=False, timeout=ANSWER_S)

    def publish(bodies: Sequence[bytes]) -> None:
        parts = [struct.pack(">l", len(bodies))]
        parts += [struct.pack(">l", len(body)) + body for body in bodies]
        problem = urllib3.exceptions.HTTPError("no nsqd is named")
        for base in bases:  # any one of them will do
            try:
                reply = pool.request("POST", base.rstrip("/") + path, body=b"".join(parts))
            except urllib3.exceptions.HTTPError as error:
                problem = error
                continue
            if reply.status == 200:
                return
            problem = urllib3.exceptions.HTTPError(f"nsqd answered {reply.status}")
        raise problem

    return publish


def _to_redis(settings: Settings) -> Publish:
    settings.require("redis_url")
    client = _redis(settings.redis_url)

    def publish(bodies: Sequence[bytes]) -> None:
        pipeline = client.pipeline(transaction=True)
        for body in bodies:
            pipeline.xadd(settings.redis_stream, {settings.redis_payload_field: body})
        pipeline.execute()

    return publish


def _redis(url: str) -> Any:
    """A client that never sends anything twice by itself. Raises ConfigurationError."""
    options: dict[str, Any] = {
        "socket_timeout": ANSWER_S,
        "socket_connect_timeout": ANSWER_S,
        "retry": Retry(NoBackoff(), 0),
    }
    place = read_redis_url("REDIS_URL", url)
    if place is None:
        return _one_server(url, options)
    login = {"username": place.username, "password": place.password}
    if place.kind == CLUSTER:
        nodes = [ClusterNode(host, port) for host, port in place.addresses]
        return redis.RedisCluster(
            startup_nodes=nodes, require_full_coverage=False, ssl=place.tls, **login, **options
        )
    tls = {"ssl": True} if place.tls else {}
    asking = {"username": place.sentinel_username, "password": place.sentinel_password}
    sentinels = Sentinel(place.addresses, sentinel_kwargs={**asking, **options, **tls})
    return sentinels.master_for(place.service, db=place.db, **login, **options, **tls)


def _one_server(url: str, options: dict[str, Any]) -> redis.Redis:
    try:
        client = redis.Redis.from_url(url, **options)
        # Otherwise the first command would find out what the library cannot use of it.
        pool = client.connection_pool
        pool.connection_class(**pool.connection_kwargs)
    except (ValueError, TypeError, redis.RedisError):
        # Not repeated here: it may hold a password.
        raise ConfigurationError(
            "REDIS_URL: must be redis://, rediss:// or unix://, with a valid port, database and "
            "options"
        ) from None
    return client
