"""An HTTP client for Stripe's library: one deadline over the whole call, one last look before it.

A timeout per read lets a server that drips a byte now and then hold a call for ever. Here every
connect, handshake, write and read gets what is left of the call's deadline, and no more. And
nothing is written before `before_write` has agreed, on a connection that stands already: a
process that slept in between must not send.
"""

from __future__ import annotations

import http.client
import io
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import stripe
import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

from models.ledger import boot_clock_s
from tasks.errors import DeadlinePassed

MAX_REPLY_BYTES: Final = 8 * 1024 * 1024
CHUNK_BYTES: Final = 16 * 1024
FIRST_FINAL_STATUS: Final = 200
MAX_IDLE_S: Final = 20.0
"""A kept connection that rested longer is not trusted: its server may be closing it just now."""
POOL_SIZE: Final = 32
"""Kept connections; more are opened under load and closed after use."""


@dataclass(slots=True)
class Call:
    """One exchange: how long it may take, what it sends, and whether it began to send."""

    deadline_s: float
    """On the boot-time clock."""
    body: bytes | None = None
    """Goes out as it is; what the library encodes is not used."""
    before_write: Callable[[], None] | None = None
    """Raises NotSent to stop the call; the connection stands, nothing is written yet."""
    began_to_write: bool = False

    def left_s(self) -> float:
        """Seconds that are left; raises DeadlinePassed when there are none."""
        left_s = self.deadline_s - boot_clock_s()
        if left_s <= 0:
            raise DeadlinePassed("the call's deadline has passed")
        return left_s

    def begin_to_write(self) -> None:
        self.left_s()
        if self.before_write is not None:
            self.before_write()
        self.began_to_write = True


_call: ContextVar[Call] = ContextVar("call")


@contextmanager
def calling(call: Call) -> Iterator[Call]:
    """Make the requests of this context obey this call."""
    token = _call.set(call)
    try:
        yield call
    finally:
        _call.reset(token)


def current_call() -> Call:
    """The call that this context's requests belong to."""
    return _call.get()


class _DeadlineReader(io.RawIOBase):
    """Reads from a socket; each read waits no longer than the call has left."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, call: Call) -> None:
        super().__init__()
        self._raw, self._sock, self._call = raw, sock, call

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._call.left_s())
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _DeadlineResponse(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        reader = _DeadlineReader(self.fp.detach(), sock, _call.get())
        self.fp = io.BufferedReader(reader)


class _DeadlineMixin:
    """What both kinds of connection add: see the module's docstring."""

    response_class = _DeadlineResponse
    sock: Any
    _dns_host: str
    port: int
    socket_options: Any
    used_at_s: float | None = None

    @property
    def is_connected(self) -> bool:
        rested = self.used_at_s is not None and time.monotonic() - self.used_at_s > MAX_IDLE_S
        return bool(super().is_connected) and not rested  # type: ignore[misc]

    def _new_conn(self) -> socket.socket:
        """Connect to the first address that answers, all within the call's time."""
        call = _call.get()
        error: OSError = OSError("no address")
        for family, kind, protocol, _, address in socket.getaddrinfo(
            self._dns_host, self.port, type=socket.SOCK_STREAM
        ):
            sock = socket.socket(family, kind, protocol)
            try:
                for option in self.socket_options or ():
                    sock.setsockopt(*option)
                sock.settimeout(call.left_s())
                sock.connect(address)
                # A TLS handshake that follows runs against this as its whole limit.
                sock.settimeout(call.left_s())
            except OSError as refused:
                sock.close()
                error = refused
            else:
                return sock
        raise error

    def request(self, *args: Any, **kwargs: Any) -> None:
        if self.sock is None:
            self.connect()  # type: ignore[attr-defined]
        _call.get().begin_to_write()
        super().request(*args, **kwargs)  # type: ignore[misc]
        self.used_at_s = time.monotonic()

    def send(self, data: bytes) -> None:
        call = _call.get()
        for start in range(0, len(data), CHUNK_BYTES):
            self.sock.settimeout(call.left_s())
            super().send(data[start : start + CHUNK_BYTES])  # type: ignore[misc]


class _Connection(_DeadlineMixin, HTTPConnection):  # type: ignore[misc]
    pass


class _SecureConnection(_DeadlineMixin, HTTPSConnection):  # type: ignore[misc]
    pass


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _SecurePool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _SecureConnection


class DeadlineClient(stripe.HTTPClient):
    """Sends the requests of Stripe's library under the `Call` of their context.

    One object serves all threads of a process; it reads no proxy settings, follows no redirect
    and never tries twice. Raises whatever broke the exchange: `Call.began_to_write` tells
    whether that can have reached anybody.
    """

    name = "chargebridge"

    def __init__(self) -> None:
        super().__init__()
        self._pools = urllib3.PoolManager(maxsize=POOL_SIZE)
        self._pools.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}

    def request(  # type: ignore[override]
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None,
        post_data: Any = None,
        **_: Any,
    ) -> tuple[bytes, int, Mapping[str, str]]:
        """One exchange; the body as bytes, the status, the headers."""
        call = _call.get()
        response = self._pools.urlopen(
            method.upper(),
            url,
            body=post_data if call.body is None else call.body,
            headers=headers,
            retries=False,
            redirect=False,
            timeout=urllib3.Timeout(total=call.left_s()),
            preload_content=False,
        )
        try:
            body = _read(response)
        except BaseException:
            # What is left of a broken reply must not be read as the next one's beginning.
            response.close()
            raise
        response.release_conn()
        return body, response.status, response.headers

    def close(self) -> None:
        """Close the kept connections."""
        self._pools.clear()


def _read(response: urllib3.BaseHTTPResponse) -> bytes:
    if response.status < FIRST_FINAL_STATUS:
        # Taken for the reply, it would leave the real one to be read as the next call's.
        raise OSError("an interim reply")
    parts: list[bytes] = []
    size = 0
    for part in response.stream(CHUNK_BYTES):
        size += len(part)
        if size > MAX_REPLY_BYTES:
            raise OSError("the reply is too large")
        parts.append(part)
    return b"".join(parts)
