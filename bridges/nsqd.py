"""What a start asks of nsqd and nsqlookupd beside the messages: are they there, and how set up."""

from __future__ import annotations

import json
import socket
import ssl
import struct
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

import urllib3

from bridges.delivery import SourceUnavailable
from models.addresses import host_and_port

TIMEOUT_S: Final = 5.0
_FRAME_RESPONSE: Final = 0
_MAX_ANSWER_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Greeting:
    """How a start introduces itself to an nsqd: as the reader will do later."""

    topic: str
    channel: str
    secret: str = ""
    tls: ssl.SSLContext | None = None


def greet(address: str, greeting: Greeting) -> dict[str, Any]:
    """Ask an nsqd at its TCP address who it is, and whether it takes us.

    Returns its answer to IDENTIFY (timeouts in ms, limits, version). Raises SourceUnavailable
    when nobody answers, or somebody who is not nsqd, or one that has no TLS where it is
    wanted, or that does not accept the certificate or the secret.
    """
    host, port = host_and_port("NSQD_TCP_ADDRESS", address)
    try:
        with socket.create_connection((host, port), timeout=TIMEOUT_S) as link:
            answer = _identify(address, link, tls=greeting.tls is not None)
            if greeting.tls is None:
                _authorize(address, link, greeting, answer)
                return answer
            with greeting.tls.wrap_socket(link, server_hostname=host) as secured:
                _read(address, secured)  # OK
                _authorize(address, secured, greeting, answer)
                return answer
    except ssl.SSLError as error:
        raise SourceUnavailable(f"{address}: no trusted TLS ({error.reason})") from None
    except (OSError, ValueError) as error:
        raise SourceUnavailable(f"{address} does not answer ({type(error).__name__})") from None


def _identify(address: str, link: socket.socket, *, tls: bool) -> dict[str, Any]:
    asked = {"client_id": "chargebridge", "feature_negotiation": True, "tls_v1": tls}
    body = json.dumps(asked).encode()
    link.sendall(b"  V2IDENTIFY\n" + struct.pack(">l", len(body)) + body)
    frame, told = _read(address, link)
    answer = json.loads(told) if frame == _FRAME_RESPONSE else None
    if not isinstance(answer, dict):
        raise SourceUnavailable(f"{address} does not speak NSQ")
    if tls and not answer.get("tls_v1"):
        raise SourceUnavailable(f"{address} offers no TLS, but NSQ_TLS_CA is set")
    return answer


def _authorize(
    address: str, link: socket.socket, greeting: Greeting, answer: dict[str, Any]
) -> None:
    """Show the secret, if one is wanted, and see that it opens the channel."""
    if not answer.get("auth_required"):
        return
    if not greeting.secret:
        raise SourceUnavailable(f"{address} wants a secret, but NSQ_AUTH_SECRET is not set")
    secret = greeting.secret.encode()
    link.sendall(b"AUTH\n" + struct.pack(">l", len(secret)) + secret)
    frame, _told = _read(address, link)
    if frame != _FRAME_RESPONSE:
        raise SourceUnavailable(f"{address} does not accept NSQ_AUTH_SECRET")
    link.sendall(f"SUB {greeting.topic} {greeting.channel}\n".encode())
    frame, _told = _read(address, link)
    if frame != _FRAME_RESPONSE:
        raise SourceUnavailable(f"{address}: NSQ_AUTH_SECRET does not open the topic and channel")


def _read(address: str, link: socket.socket) -> tuple[int, bytes]:
    """One frame: what kind it is, and what it says."""
    size, frame = struct.unpack(">ll", _exactly(link, 8))
    if not 4 <= size <= _MAX_ANSWER_BYTES:
        raise SourceUnavailable(f"{address} does not speak NSQ")
    return frame, _exactly(link, size - 4)


def _exactly(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = link.recv(size - len(data))
        if not chunk:
            raise ConnectionResetError
        data += chunk
    return data


def create_channel(http_address: str, topic: str, channel: str) -> None:
    """Make topic and channel, so that nothing is published past the bridge.

    Raises SourceUnavailable.
    """
    _post(http_address, "/topic/create", topic=topic)
    _post(http_address, "/channel/create", topic=topic, channel=channel)


def ping(http_address: str) -> None:
    """Raise SourceUnavailable unless an nsqd or nsqlookupd answers here."""
    _request("GET", http_address, "/ping")


def _post(http_address: str, path: str, **query: str) -> None:
    _request("POST", http_address, f"{path}?{urlencode(query)}")


def _request(method: str, http_address: str, path: str) -> None:
    base = http_address.rstrip("/")
    if "://" not in base:
        base = f"http://{base}"
    with urllib3.PoolManager(retries=False, timeout=TIMEOUT_S) as http:
        try:
            reply = http.request(method, base + path)
        except urllib3.exceptions.HTTPError as error:
            kind = type(error).__name__
            raise SourceUnavailable(f"{http_address} does not answer ({kind})") from None
    if reply.status != 200:
        raise SourceUnavailable(f"{http_address} answers {reply.status}")
