"""Reads Stripe's reply into plain values: status, headers and decoded body in, a Reply out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from models.outcomes import Reply, ReplyKind

MAX_ERROR_MESSAGE_CHARACTERS: Final = 300
"""Of Stripe's own message to an error; kept with the record for people."""
OBJECT_NAMES: Final = {"payment_intents": "payment_intent", "charges": "charge"}
"""What the objects of an endpoint call themselves."""
_UNSTORABLE: Final = re.compile("[\x00\ud800-\udfff]")
BROKEN: Final = Reply(kind=ReplyKind.BROKEN, error_code="no_readable_reply")


def read_reply(
    endpoint: str,
    status: int | None,
    headers: Mapping[str, str] | None,
    data: object,
    *,
    charge_key: str | None = None,
) -> Reply:
    """What one exchange on `endpoint` came to. `data` is the decoded body, None if not JSON.

    A reply that is not the object or the error envelope that was to be expected proves nothing:
    something between us and Stripe may have written it. Nor does one that shows another charge
    than `charge_key`: it is the answer to somebody else.
    """
    if status is None or headers is None or not isinstance(data, Mapping):
        return BROKEN
    if 200 <= status < 300:
        if data.get("object") != OBJECT_NAMES.get(endpoint) or _is_anothers(data, charge_key):
            return BROKEN
        return _success(status, headers, data)
    error = data.get("error")
    if not isinstance(error, Mapping) or _is_anothers(error.get("payment_intent"), charge_key):
        return BROKEN
    return _refusal(status, headers, error)


def _is_anothers(shown: object, charge_key: str | None) -> bool:
    metadata = shown.get("metadata") if isinstance(shown, Mapping) else None
    key = metadata.get("charge_key") if isinstance(metadata, Mapping) else None
    return charge_key is not None and key is not None and key != charge_key


def _success(status: int, headers: Mapping[str, str], data: Mapping[str, Any]) -> Reply:
    is_charge = data["object"] == "charge"
    error = data.get("last_payment_error")
    error = error if isinstance(error, Mapping) else {}
    return Reply(
        kind=ReplyKind.ANSWER,
        http_status=status,
        object_status=status_of(data),
        payment_intent_id=text_of(data.get("payment_intent" if is_charge else "id")),
        charge_id=text_of(data.get("id" if is_charge else "latest_charge")),
        error_code=text_of(data.get("failure_code") if is_charge else error.get("code")),
        decline_code=text_of(error.get("decline_code")),
        **_exchange(headers),
    )


def _refusal(status: int, headers: Mapping[str, str], error: Mapping[str, Any]) -> Reply:
    intent = error.get("payment_intent")
    return Reply(
        kind=ReplyKind.ANSWER,
        http_status=status,
        payment_intent_id=text_of(intent.get("id")) if isinstance(intent, Mapping) else None,
        charge_id=text_of(error.get("charge")),
        error_type=text_of(error.get("type")),
        error_code=text_of(error.get("code")) or text_of(error.get("type")),
        decline_code=text_of(error.get("decline_code")),
        error_message=_message(status, error),
        **_exchange(headers),
    )


def status_of(data: Mapping[str, Any]) -> str | None:
    """An intent's or charge's status; a charge that took no money yet says requires_capture."""
    status = text_of(data.get("status"))
    if data.get("object") == "charge" and status == "succeeded" and data.get("captured") is False:
        return "requires_capture"
    return status


def _exchange(headers: Mapping[str, str]) -> dict[str, Any]:
    forwarded = headers.get("Vault-Forwarded")
    return {
        "request_id": text_of(headers.get("Request-Id")),
        "replayed": headers.get("Idempotent-Replayed", "").lower() == "true",
        "forwarded": None if forwarded is None else forwarded.lower() == "yes",
    }


def _message(status: int, error: Mapping[str, Any]) -> str | None:
    # A refused key is quoted, in part, by the message that refuses it.
    if status in (401, 403):
        return None
    text = text_of(error.get("message"))
    return text[:MAX_ERROR_MESSAGE_CHARACTERS] if text else None


def text_of(value: object) -> str | None:
    """A non-empty text, or the id of an expanded object."""
    if isinstance(value, Mapping):
        value = value.get("id")
    if not isinstance(value, str) or not value:
        return None
    # An outcome that the ledger cannot store would never be recorded.
    return _UNSTORABLE.sub("\ufffd", value)
