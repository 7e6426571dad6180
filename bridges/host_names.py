"""Where a host is, found beside the event loop: a silent name server would hold it up."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from typing import Final

from bridges.threads import DaemonThreads

LOOKUP_THREADS: Final = 4
LOOKUP_LIMIT_S: Final = 10.0


class HostNames:
    """Looks up one address of a host; after a try that failed, the next one of several."""

    def __init__(self) -> None:
        self._threads = DaemonThreads(LOOKUP_THREADS, "names")
        self._failures: dict[str, int] = {}

    async def address_of(self, host: str) -> str:
        """Raise OSError when the host has no address, or nobody tells it in time."""
        if _is_address(host):
            return host
        loop = asyncio.get_running_loop()
        looking = loop.run_in_executor(self._threads, _addresses, host)
        found = await asyncio.wait_for(looking, LOOKUP_LIMIT_S)
        return found[self._failures.get(host, 0) % len(found)]

    def failed(self, host: str) -> None:
        """Nobody was there at the address that was given last."""
        self._failures[host] = self._failures.get(host, 0) + 1

    def close(self) -> None:
        self._threads.shutdown()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _addresses(host: str) -> Sequence[str]:
    """At least one; those of IPv4 first, where nsqd listens unless it is told otherwise."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except ValueError:
        raise OSError("not the name of a host") from None
    found.sort(key=lambda one: one[0] != socket.AF_INET)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
