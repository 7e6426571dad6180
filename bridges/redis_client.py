"""Connections to Redis, with every option that matters given by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import ReadOnlyError, RedisClusterException, RedisError

from models.errors import ConfigurationError
from models.redis_urls import CLUSTER, read_redis_url

if TYPE_CHECKING:
    from models.redis_urls import RedisPlace

CONNECT_TIMEOUT_S: Final = 2.0
UNAVAILABLE: Final = (RedisError, RedisClusterException, OSError)
"""All that a command may end with; the Cluster's own errors are of another family."""

Client: TypeAlias = Redis | RedisCluster


def connect(url: str, timeout_s: float) -> Client:
    """A client that reads bytes as they are and never sends anything twice by itself.

    A Cluster's redirections are followed: a command that was redirected was not executed.
    Raises ConfigurationError.
    """
    options: dict[str, Any] = {
        "protocol": 2,
        "decode_responses": False,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
        "client_name": "chargebridge-bridge",
    }
    place = read_redis_url("REDIS_URL", url)
    client = _one_server(url, options) if place is None else _several(place, options)
    for command in ("XREADGROUP", "XAUTOCLAIM", "XRANGE"):
        client.set_response_callback(command, _as_it_is)
    return client


def _one_server(url: str, options: dict[str, Any]) -> Redis:
    try:
        client = Redis.from_url(url, **options)
        # Otherwise the first command would find out what the library cannot use of it.
        pool = client.connection_pool
        pool.connection_class(**pool.connection_kwargs)
    except (ValueError, TypeError, RedisError):
        # Not repeated here: it may hold a password.
        raise ConfigurationError(
            "REDIS_URL: must be redis://, rediss:// or unix://, with a valid port, database and "
            "options"
        ) from None
    return client


def _several(place: RedisPlace, options: dict[str, Any]) -> Client:
    login = {"username": place.username, "password": place.password}
    if place.kind == CLUSTER:
        nodes = [ClusterNode(host, port) for host, port in place.addresses]
        # The stream lies in one slot: that others are not served is no reason to stop.
        return RedisCluster(
            startup_nodes=nodes, require_full_coverage=False, ssl=place.tls, **login, **options
        )
    # Not given where it is off: only the connections of TLS know the name.
    tls = {"ssl": True} if place.tls else {}
    asking = {
        "username": place.sentinel_username,
        "password": place.sentinel_password,
        "socket_timeout": CONNECT_TIMEOUT_S,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
    }
    sentinels = Sentinel(place.addresses, sentinel_kwargs={**asking, **tls})
    client: Redis = sentinels.master_for(place.service, db=place.db, **login, **options, **tls)
    return client


async def forget_connections(client: Client, error: BaseException) -> None:
    """After READONLY: it was demoted, and a name or a Sentinel may know another by now."""
    if isinstance(error, ReadOnlyError) and isinstance(client, Redis):
        await client.connection_pool.disconnect(inuse_connections=False)


def knows_nodes_by_address(client: Client) -> bool:
    """Whether it keeps the addresses that it found itself in place of those of its URL."""
    return isinstance(client, RedisCluster)


async def close(client: Client) -> None:
    """Drop all its connections, those to the Sentinels too."""
    await client.aclose()
    if isinstance(client, RedisCluster):
        # One that was about to look for its nodes anew takes itself for closed.
        for node in client.get_nodes():
            await node.disconnect()
    pool = getattr(client, "connection_pool", None)
    if isinstance(pool, SentinelConnectionPool):
        await pool.sentinel_manager.aclose()


def _as_it_is(reply: Any, **_options: Any) -> Any:
    return reply
