"""Free TCP ports on 127.0.0.1, chosen once and kept."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

LOOPBACK = "127.0.0.1"
FIRST, LAST = 20_000, 32_000
"""Below the range that the kernel takes for outgoing connections."""
ATTEMPTS = 2_000

_reservations: dict[int, int] = {}


def choose_ports(names: Iterable[str], kept: Mapping[str, int]) -> dict[str, int]:
    """A port for each name: the kept one where nobody else listens on it, else a new one."""
    ports: dict[str, int] = {}
    for name in names:
        port = kept.get(name)
        ports[name] = port if port is not None and _reserve(port) else free_port()
    return ports


def free_port(first: int = FIRST, last: int = LAST) -> int:
    """A port nobody listens on, reserved against other sandboxes while this process lives."""
    chooser = random.SystemRandom()
    for _ in range(ATTEMPTS):
        port = chooser.randint(first, last)
        if port not in _reservations and _reserve(port):
            return port
    raise OSError(f"no free port between {first} and {last}")


def _reserve(port: int) -> bool:
    """Two test runs that look at the same moment must not both find the port free."""
    if port not in _reservations:
        lock = os.open(_reservation_folder() / str(port), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        _reservations[port] = lock
    return is_free(port)


def reservations() -> tuple[int, ...]:
    """File descriptors: a process that inherits them keeps the ports of this one reserved."""
    return tuple(_reservations.values())


def _reservation_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"chargebridge-ports-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def is_open(port: int, timeout_s: float = 0.5) -> bool:
    """Whether something accepts connections there."""
    try:
        socket.create_connection((LOOPBACK, port), timeout_s).close()
    except OSError:
        return False
    return True
