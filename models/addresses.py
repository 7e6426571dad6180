"""`host:port` among the settings, checked before a library swallows a wrong one."""

from __future__ import annotations

import ipaddress
import re
from typing import Final

from models.errors import ConfigurationError

MAX_PORT: Final = 65_535
_PORT: Final = re.compile(r"[0-9]{1,5}")
_HOST: Final = re.compile(r"[^\s\x00-\x1f\x7f/\\@?#:\[\]]+")


def check_host(host: str) -> None:
    """Raise ValueError for what is neither a name nor an address."""
    if host.startswith("[") or ":" in host:
        ipaddress.IPv6Address(host.removeprefix("[").removesuffix("]"))
        if host.startswith("[") != host.endswith("]"):
            raise ValueError("half a pair of brackets")
    elif _HOST.fullmatch(host) is None:
        raise ValueError("no host")
    else:
        # As the look-up will do it: a label that is empty or too long breaks there.
        host.encode("idna")


def read_port(text: str, *, lowest: int = 1) -> int:
    """A port up to 65535; raises ValueError."""
    if _PORT.fullmatch(text) is None or not lowest <= int(text) <= MAX_PORT:
        raise ValueError("no port")
    return int(text)


def split_address(address: str, *, lowest: int = 1) -> tuple[str, int]:
    """Take `host:port` apart; raises ValueError."""
    host, _, port = address.rpartition(":")
    check_host(host)
    return host, read_port(port, lowest=lowest)


def host_and_port(setting: str, address: str) -> tuple[str, int]:
    """Read `host:port`; raises ConfigurationError that names the setting."""
    try:
        return split_address(address)
    except ValueError:
        raise ConfigurationError(f"{setting}: must be host:port") from None


def addresses(setting: str, text: str) -> list[str]:
    """Read one or several `host:port`, separated by commas; HTTP's may begin with `http://`.

    Raises ConfigurationError.
    """
    found = [part.strip() for part in text.split(",") if part.strip()]
    prefix = "http://" if setting.endswith("_HTTP_ADDRESS") else ""
    for address in found:
        host_and_port(setting, address.removeprefix(prefix))
    return found
