"""Flower's settings. Flower runs this file before it builds its pages; see tasks/flower_fences.py.

It refuses to start without credentials: its pages would be open to whoever reaches the port.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from tornado.options import options

from models.errors import ConfigurationError
from models.logs import configure_logging
from models.settings import load_settings
from tasks import flower_fences

LOOPBACK = "127.0.0.1"


def _load() -> tuple[list[str], int, str]:
    """Credentials, port and address; what the command line says stands."""
    try:
        settings = load_settings()
        credentials = _credentials(settings.flower_basic_auth)
    except ConfigurationError as error:
        raise SystemExit(f"chargebridge: {error}") from None
    port = urlsplit(settings.flower_url).port or options.port
    return credentials, port, options.address or LOOPBACK


def _credentials(text: str) -> list[str]:
    """`user:password`, several with commas between."""
    if not text and options.auth:
        return []
    if not text:
        raise ConfigurationError("FLOWER_BASIC_AUTH is not set")
    pairs = text.split(",")
    if any(not all(pair.partition(":")[::2]) for pair in pairs):
        raise ConfigurationError("FLOWER_BASIC_AUTH must be user:password")
    return pairs


basic_auth, port, address = _load()
format_task = flower_fences.format_task
flower_fences.install()
configure_logging("flower")
