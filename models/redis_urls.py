"""Where a Redis is: one server, one that Sentinels watch over, or a Cluster."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit

from models.addresses import split_address
from models.errors import ConfigurationError

SENTINEL: Final = "sentinel"
CLUSTER: Final = "cluster"
_WANTED: Final = {
    SENTINEL: "redis+sentinel://host:port,host:port/service/db",
    CLUSTER: "redis+cluster://host:port,host:port",
}


@dataclass(frozen=True, slots=True)
class RedisPlace:
    """A `redis+sentinel://` or `redis+cluster://` URL, taken apart."""

    kind: str
    """`sentinel` or `cluster`."""
    addresses: Sequence[tuple[str, int]]
    """The Sentinels, or some nodes of the Cluster."""
    service: str = ""
    """What the Sentinels call it."""
    db: int = 0
    tls: bool = False
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    sentinel_username: str | None = field(default=None, repr=False)
    sentinel_password: str | None = field(default=None, repr=False)


def read_redis_url(setting: str, url: str) -> RedisPlace | None:
    """Take the URL apart; None for one of the plain kind, which every library reads.

    Raises ConfigurationError that names the setting and repeats nothing of the URL, which may
    hold a password.
    """
    scheme, _, kind = url.partition("://")[0].partition("+")
    if not kind:
        return None
    if scheme not in ("redis", "rediss") or kind not in _WANTED:
        raise ConfigurationError(
            f"{setting}: must be redis://, rediss:// or unix://, or {' or '.join(_WANTED.values())}"
        )
    try:
        return _read(kind, url, tls=scheme == "rediss")
    except ValueError:
        raise ConfigurationError(f"{setting}: must be {_WANTED[kind]}") from None


def _read(kind: str, url: str, *, tls: bool) -> RedisPlace:
    rest = url.partition("://")[2]
    # By hand: urlsplit refuses more than one address in brackets, in newer Pythons only.
    places = re.split(r"[/?#]", rest, maxsplit=1)[0]
    parts = urlsplit(f"//{rest[len(places) :]}")
    login, _, hosts = places.rpartition("@")
    username, _, password = login.partition(":")
    path = [unquote(part) for part in parts.path.split("/") if part]
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    service, db = "", 0
    if kind == SENTINEL:
        if not 1 <= len(path) <= 2 or "@" in parts.path:
            raise ValueError  # an @ here is that of a login with a / in its password
        service, db = path[0], int(path[1]) if len(path) > 1 else 0
    elif path not in ([], ["0"]):
        raise ValueError  # a Cluster has one database
    if db < 0:
        raise ValueError
    return RedisPlace(
        kind=kind,
        addresses=[_address(text) for text in hosts.split(",")],
        service=service,
        db=db,
        tls=tls,
        username=unquote(username) or None,
        password=unquote(password) or None,
        sentinel_username=query.get("sentinel_username"),
        sentinel_password=query.get("sentinel_password"),
    )


def _address(text: str) -> tuple[str, int]:
    host, port = split_address(text.strip())
    return host.strip("[]"), port
