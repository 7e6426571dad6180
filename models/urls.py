"""URLs and addresses among the settings, checked before any library reads them.

A library that cannot read one says so with a piece of it in the error, and an unescaped `@`, `/`
or `#` in a password makes that piece the password. So what is refused here is named by its
setting and by the rule, and nothing of the value is repeated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

from models.addresses import MAX_PORT, addresses, check_host, read_port
from models.errors import ConfigurationError
from models.redis_urls import read_redis_url

_HTTP_RULE: Final = (
    f"must be an http or https URL with a host and without a query; a port is from 1 to {MAX_PORT}"
)
_REDIS_RULE: Final = (
    "must be redis://, rediss:// or unix://, with a valid host, port and database; "
    "what is special in a password is percent-encoded"
)
_DATABASE_RULE: Final = (
    "is not a database URL: postgresql://user:password@host:port/database, "
    "where what is special in a password is percent-encoded"
)
_BROKER_RULE: Final = (
    "Celery cannot use this URL; it must be redis://user:password@host:port/database, "
    "where what is special in a password is percent-encoded"
)
_AUTHORITY: Final = re.compile(r"(?:[^@]*@)*(\[[^\[\]]*\]|[^\[\]:@]*)(?::([^:@]*))?")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_DATABASE: Final = re.compile(
    r"(?P<scheme>[\w+]+)://"
    # The login ends at the first @ behind its colon: one more @ stands in no host and no name.
    r"(?:[^:/]*(?::[^@]*)?@)?"
    r"(?:\[[^\[\]/?@]+\]|[^\[\]/?@:]*)(?::(?P<port>[^/?@:]*))?"
    r"(?:/[^?@]*)?(?:\?.*)?"
)
_DATABASE_SCHEMES: Final = ("postgres", "postgresql", "postgresql+psycopg")
_QUERY: Final = r"(?:\?(?:[a-z_]+=[^&#]*(?:&[a-z_]+=[^&#]*)*&?)?)?"
_REDIS_PATH: Final = re.compile(rf"(?:/(?:[0-9]{{1,9}}/?)?)?{_QUERY}")
_UNIX_PATH: Final = re.compile(rf"/[^?#@]+{_QUERY}")
_HTTP_PATH: Final = re.compile(r"(?:/[^?#@]*)?")
_REDIS_BROKERS: Final = ("redis", "rediss", "sentinel")
_OTHER_BROKERS: Final = ("amqp", "amqps", "pyamqp", "librabbitmq")


class Url(NamedTuple):
    """What of a URL is checked. `rest` is path, query and fragment as they were written."""

    scheme: str
    host: str
    port: int | None
    rest: str


def read_url(url: str) -> Url:
    """Take a URL apart; raises ValueError for a host or a port that is none."""
    scheme, colon, behind = url.partition("://")
    if not colon:
        raise ValueError("no URL")
    urlsplit(url)
    authority = re.split(r"[/?#]", behind, maxsplit=1)[0]
    found = _AUTHORITY.fullmatch(authority)
    if found is None:
        raise ValueError("no authority")
    host, port = unquote(found[1]), found[2]
    if host:
        check_host(host)
    return Url(scheme, host, None if port is None else read_port(port), behind[len(authority) :])


def check_http_url(setting: str, url: str) -> None:
    """Refuse what is no http or https URL with a host. Raises ConfigurationError."""
    if not _fits(_is_http, url):
        raise ConfigurationError(f"{setting} {_HTTP_RULE}")


def check_database_url(setting: str, url: str) -> None:
    """Refuse what is no PostgreSQL URL. Raises ConfigurationError."""
    scheme, colon, _ = url.partition("://")
    if colon and scheme not in _DATABASE_SCHEMES:
        raise ConfigurationError(f"{setting} must name a PostgreSQL database")
    if not _fits(_is_database, url):
        raise ConfigurationError(f"{setting} {_DATABASE_RULE}")


def check_redis_url(setting: str, url: str) -> None:
    """Refuse what is no Redis URL: of one server, Sentinels or a Cluster.

    Raises ConfigurationError.
    """
    if _CONTROL.search(url):
        raise ConfigurationError(f"{setting}: {_REDIS_RULE}")
    if read_redis_url(setting, url) is None:
        check_redis_server_url(setting, url)


def check_redis_server_url(setting: str, url: str) -> None:
    """Refuse what is no URL of one Redis server. Raises ConfigurationError."""
    if not _fits(_is_redis_server, url):
        raise ConfigurationError(f"{setting}: {_REDIS_RULE}")


def check_broker_url(setting: str, text: str) -> None:
    """Refuse a broker's URL that Celery could not read; several have `;` between.

    Raises ConfigurationError.
    """
    if not all(_fits(_is_broker, url) for url in text.split(";")):
        raise ConfigurationError(f"{setting}: {_BROKER_RULE}")


def _fits(check: Callable[[str], bool], url: str) -> bool:
    try:
        return _CONTROL.search(url) is None and check(url)
    except ValueError:
        return False


def _is_http(url: str) -> bool:
    parts = read_url(url)
    return (
        parts.scheme.lower() in ("http", "https")
        and bool(parts.host)
        and _HTTP_PATH.fullmatch(parts.rest) is not None
    )


def _is_database(url: str) -> bool:
    """Not read like other URLs.

    In this kind a password may hold `/`, `?` and `#` as they are, and a host may be left out or
    be several with commas between.
    """
    found = _DATABASE.fullmatch(url)
    if found is not None and found["port"] is not None:
        read_port(found["port"])
    return found is not None


def _is_redis_server(url: str) -> bool:
    parts = read_url(url)
    if parts.scheme == "unix":
        return not parts.host and _UNIX_PATH.fullmatch(parts.rest) is not None
    return parts.scheme in ("redis", "rediss") and _has_redis_parts(parts)


def _has_redis_parts(parts: Url) -> bool:
    return bool(parts.host) and _REDIS_PATH.fullmatch(parts.rest) is not None


def _is_broker(url: str) -> bool:
    """Of kinds that are not named here each has a form of its own, which Celery knows."""
    scheme, colon, _ = url.partition("://")
    if scheme in _REDIS_BROKERS:
        return _has_redis_parts(read_url(url))
    if scheme in _OTHER_BROKERS:
        read_url(url)
    return bool(colon)


URL_CHECKS: Final[Mapping[str, Callable[[str, str], object]]] = {
    "database_url": check_database_url,
    "celery_broker_url": check_broker_url,
    "redis_url": check_redis_url,
    "rate_limit_redis_url": check_redis_server_url,
    "stripe_api_base": check_http_url,
    "vault_url": check_http_url,
    "flower_url": check_http_url,
    "nsqd_tcp_address": addresses,
    "nsqd_http_address": addresses,
    "nsq_lookupd_http_address": addresses,
}
"""By the field of Settings: each is called with the setting's name and value when they load."""
