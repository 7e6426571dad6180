"""The way to Stripe: one exchange, one deadline over all of it, and plain words for what broke.

Only a connection that was never made, or a last look that said no, proves that nothing was sent.
Whatever breaks after that proves nothing.
"""

from __future__ import annotations

import http.client
import io
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any, Final, cast
from urllib.parse import urlsplit

from models.ledger import boot_clock_s
from models.urls import check_http_url
from vault.rules import FORM, ForwardCall

MAX_REPLY_BYTES: Final = 8 * 1024 * 1024
MAX_IDLE_S: Final = 20.0
"""A kept connection that rested longer may be closed by the other side at any moment."""
FIRST_FINAL_STATUS: Final = 200
KEY_ID_LENGTH: Final = 16
USER_AGENT: Final = "chargebridge-vault"
_KEPT_HEADERS: Final = {
    name.lower(): name
    for name in (
        "Content-Type",
        "Idempotency-Key",
        "Idempotent-Replayed",
        "Original-Request",
        "Request-Id",
        "Retry-After",
        "Stripe-Rate-Limited-Reason",
        "Stripe-Should-Retry",
        "Stripe-Version",
    )
}
"""What goes back to the client; the rest is between Stripe and the vault."""


class NotConnected(Exception):  # noqa: N818 - says what happened
    """No connection was made; not one byte of the request was written."""


class NotSent(Exception):  # noqa: N818 - says what happened
    """The last look before the write said no."""


class Broken(Exception):  # noqa: N818 - says what happened
    """Timeout, reset, too long, not HTTP: the request may have been executed."""


@dataclass(frozen=True, slots=True)
class UpstreamReply:
    """A whole reply, with the headers that concern the client."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class _Deadlined(io.RawIOBase):
    """Reads that together end by the deadline; a timeout for each could go on for ever."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, deadline_s: float) -> None:
        super().__init__()
        self._raw, self._sock, self._deadline_s = raw, sock, deadline_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(_left_s(self._deadline_s))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """A response that is read under one deadline."""

    def __init__(self, sock: socket.socket, *, deadline_s: float, method: str) -> None:
        super().__init__(sock, method=method)
        raw = self.fp.detach()
        self.fp = io.BufferedReader(_Deadlined(raw, sock, deadline_s))


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - boot_clock_s()
    if left_s <= 0:
        raise TimeoutError("the deadline has passed")
    return left_s


def _on_one_line(value: str) -> str:
    """A header's value as it may go on to the client: a folded one would not be written at all."""
    return " ".join("".join(c if c.isprintable() else " " for c in value).split())


def _has_ended(sock: socket.socket) -> bool:
    """Whether the other side of a resting connection has closed it, or says what nobody asked."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


class Upstream:
    """Stripe under one account key. Threads share it; connections are kept between calls."""

    def __init__(self, api_base: str, api_key: str, limit_s: float) -> None:
        check_http_url("STRIPE_API_BASE", api_base)
        parts = urlsplit(api_base)
        self.limit_s = limit_s
        self.key_id = sha256(f"vault-upstream:{api_key}".encode()).hexdigest()[:KEY_ID_LENGTH]
        self._key = api_key
        self._prefix = parts.path.rstrip("/")
        self._host, self._port = parts.hostname or "", parts.port
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._idle: deque[tuple[http.client.HTTPConnection, float]] = deque()
        self._lock = threading.Lock()

    def exchange(self, call: ForwardCall, before_write: Callable[[], None]) -> UpstreamReply:
        """Send a call and read the whole reply; raises NotConnected, NotSent or Broken.

        `before_write` raises NotSent to stop it, when the connection stands already.
        """
        deadline_s = boot_clock_s() + self.limit_s
        try:
            connection = self._connected(deadline_s)
        except OSError as error:
            raise NotConnected(type(error).__name__) from None
        whole = False
        try:
            before_write()
            reply = self._send(connection, call, deadline_s)
            whole = True
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Broken(type(error).__name__) from None
        finally:
            if whole and connection.sock is not None:
                self._idle.append((connection, time.monotonic()))
            else:
                # What is left of a broken reply must not be read as the next one's beginning.
                connection.close()
        return reply

    def close(self) -> None:
        """Close the kept connections."""
        while self._idle:
            self._idle.pop()[0].close()

    def redact(self, body: bytes) -> bytes:
        """A body without the account key, should Stripe ever quote it."""
        return body.replace(self._key.encode(), b"[key]")

    def _connected(self, deadline_s: float) -> http.client.HTTPConnection:
        while (kept := self._kept()) is not None:
            connection, used_at_s = kept
            if time.monotonic() - used_at_s < MAX_IDLE_S and not _has_ended(connection.sock):
                return connection
            connection.close()
        connection = self._new(_left_s(deadline_s))
        try:
            connection.connect()
        except OSError:
            connection.close()
            raise
        _left_s(deadline_s)
        return connection

    def _new(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        return http.client.HTTPSConnection(
            self._host, self._port, timeout=timeout_s, context=self._tls
        )

    def _kept(self) -> tuple[http.client.HTTPConnection, float] | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _send(
        self, connection: http.client.HTTPConnection, call: ForwardCall, deadline_s: float
    ) -> UpstreamReply:
        connection.sock.settimeout(_left_s(deadline_s))
        connection.request(
            call.method, self._prefix + call.target, body=call.body, headers=self._headers(call)
        )
        response_class = partial(_Response, deadline_s=deadline_s)
        connection.response_class = cast("type[_Response]", response_class)
        response = connection.getresponse()
        if response.status < FIRST_FINAL_STATUS:
            # Taken for the reply, it would leave the real one to be read as the next call's.
            raise ValueError("an interim reply")
        if response.length is None and not response.chunked:
            raise ValueError("the reply has no length: a cut one would look whole")
        body = response.read(MAX_REPLY_BYTES)
        if response.length or not response.isclosed():
            raise ValueError("the reply was cut, or is too long")
        kept = ((_KEPT_HEADERS.get(name.lower()), value) for name, value in response.getheaders())
        headers = {name: _on_one_line(value) for name, value in kept if name is not None}
        return UpstreamReply(response.status, headers, body)

    def _headers(self, call: ForwardCall) -> dict[str, str]:
        headers = {
            "Authorization": f"Bearer {self._key}",
            "User-Agent": USER_AGENT,
            "Accept-Encoding": "identity",
        }
        if call.body is not None:
            headers["Content-Type"] = FORM
        if call.idempotency_key is not None:
            headers["Idempotency-Key"] = call.idempotency_key
        if call.stripe_version is not None:
            headers["Stripe-Version"] = call.stripe_version
        return headers
