"""What a start asks of nsqd and nsqlookupd beside the messages: are they there, and how set up."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, Final
from urllib.parse import urlencode

import urllib3

from bridges.addresses import host_and_port
from bridges.delivery import SourceUnavailable

TIMEOUT_S: Final = 2.0
_FRAME_RESPONSE: Final = 0
_MAX_ANSWER_BYTES: Final = 64 * 1024


def identify(address: str, *, tls: bool = False) -> dict[str, Any]:
    """Ask an nsqd at its TCP address who it is: timeouts in ms, limits, version.

    Raises SourceUnavailable when nobody answers, or somebody who is not nsqd, or one that
    has no TLS where it is wanted.
    """
    host, port = host_and_port("NSQD_TCP_ADDRESS", address)
    asked = {"client_id": "chargebridge", "feature_negotiation": True, "tls_v1": tls}
    body = json.dumps(asked).encode()
    try:
        with socket.create_connection((host, port), timeout=TIMEOUT_S) as link:
            link.sendall(b"  V2IDENTIFY\n" + struct.pack(">l", len(body)) + body)
            size, frame = struct.unpack(">ll", _exactly(link, 8))
            if frame != _FRAME_RESPONSE or not 4 <= size <= _MAX_ANSWER_BYTES:
                raise SourceUnavailable(f"{address} does not speak NSQ")
            answer = json.loads(_exactly(link, size - 4))
    except (OSError, ValueError) as error:
        raise SourceUnavailable(f"{address} does not answer ({type(error).__name__})") from None
    if not isinstance(answer, dict):
        raise SourceUnavailable(f"{address} does not speak NSQ")
    if tls and not answer.get("tls_v1"):
        raise SourceUnavailable(f"{address} offers no TLS, but NSQ_TLS_CA is set")
    return answer


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
