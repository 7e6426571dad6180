"""Requests and replies as plain values, so that the same exchange runs in process or over HTTP."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qsl

Json = dict[str, Any]

#: How a reply reaches the client. `reset` tears the connection down with RST, `close` ends it
#: without a byte of reply, `truncate` announces the whole body and sends half of it.
Delivery = Literal["whole", "truncate", "reset", "close"]


@dataclass(frozen=True)
class Request:
    """One HTTP request. Header names are lower case; `query` and `body` are as received."""

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    def parameters(self) -> dict[str, str]:
        """Query and form parameters, flat, in bracket notation as the client sent them.

        Raises ValueError when they are not UTF-8. A repeated name keeps its last value.
        """
        pairs = parse_qsl(self.query, keep_blank_values=True, errors="strict") if self.query else []
        if self.body and self.method != "GET":
            text = self.body.decode("utf-8")
            pairs += parse_qsl(text, keep_blank_values=True, errors="strict")
        return dict(pairs)

    def api_key(self) -> str | None:
        """The secret key from a Bearer or Basic authorization, None when there is none."""
        scheme, _, value = self.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return value.strip() or None
        if scheme.lower() == "basic":
            try:
                user = base64.b64decode(value).decode("utf-8").partition(":")[0]
            except (binascii.Error, UnicodeDecodeError):
                return None
            return user or None
        return None


@dataclass(frozen=True)
class Reply:
    """One HTTP reply. `body` is the exact text; `replayed` says it came from the saved answers.

    A long listing comes as `chunks` instead, to be sent bit by bit.
    """

    status: int
    body: str
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "application/json"
    delivery: Delivery = "whole"
    replayed: bool = False
    chunks: Iterable[str] | None = None

    @property
    def status_sent(self) -> int | None:
        """The status that the client gets to see, None when the connection just ends."""
        return self.status if self.delivery in {"whole", "truncate"} else None

    def json(self) -> Any:
        """The body, decoded. Chunks can be read once."""
        return json.loads(self.body if self.chunks is None else "".join(self.chunks))


@dataclass(frozen=True)
class Pause:
    """A wait in the middle of an exchange; whoever drives the exchange does the waiting.

    `until_client_leaves` ends it early when nobody is left to read the reply.
    """

    seconds: float
    until_client_leaves: bool = False


class StripeError(Exception):
    """A refusal in Stripe's error envelope.

    `executed` says that the endpoint had begun its work, so that the answer belongs to the
    idempotency key and is replayed; a refusal ahead of that is not saved.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        executed: bool = False,
        **fields: Any,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.executed = executed
        self.error: Json = {"type": kind, "message": message}
        self.error.update({name: value for name, value in fields.items() if value is not None})

    @property
    def body(self) -> str:
        """The envelope as the client receives it."""
        return encode({"error": self.error})


def encode(value: Any) -> str:
    """JSON text without needless blanks."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def no_such(what: str, object_id: str, param: str, *, status: int = 404) -> StripeError:
    """`resource_missing`: found out while executing, so it is saved with the key."""
    return StripeError(
        status,
        f"No such {what}: '{object_id}'",
        code="resource_missing",
        param=param,
        executed=True,
    )
