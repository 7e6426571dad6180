"""What the vault answers by itself: refusals in Stripe's error envelope, and plain JSON.

Every answer says whether the request was passed on (`Vault-Forwarded`). That is what a refusal
proves by: without the header, a reply proves nothing at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

FORWARDED: Final = "Vault-Forwarded"
BUSY_RETRY_S: Final = 1
"""What a client is told to wait when every place is taken."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One HTTP reply, ready to be written."""

    status: int
    body: bytes
    forwarded: bool
    headers: Mapping[str, str] = field(default_factory=dict)
    code: str | None = None
    """Of a refusal; for the metrics."""


REFUSALS: Final[Mapping[str, tuple[int, str]]] = {
    # For good: the record becomes `blocked`.
    "over_cap": (403, "the hold would pass the billing run's cap"),
    "key_revoked": (403, "the vault key was revoked"),
    "run_closed": (403, "the billing run is closed"),
    # Not now, or not so: nothing of it reached Stripe.
    "no_billing_run": (403, "there is no budget for this billing run and currency"),
    "run_closing": (409, "the billing run is being closed; it closes or is open again at once"),
    "key_expired": (403, "the vault key has expired; the billing run may have a newer one"),
    "key_unknown": (401, "no such vault key"),
    "busy": (503, "every place is taken; the request was not looked at"),
    "endpoint_refused": (403, "the vault does not forward this request"),
    "other_hold_live": (409, "another hold of the same charge key is live"),
    "upstream_unreachable": (503, "no connection to Stripe; nothing was sent"),
    # They say nothing of an earlier forward: ask Stripe.
    "resend_window": (403, "the idempotency key was first forwarded too long ago"),
    "upstream_key_changed": (403, "the idempotency key was forwarded under another Stripe key"),
}
"""Status and what it means. No 402 and no 400: a refusal is not the customer's failure, and a
client that knows Stripe only must not take one for a declined card or a bad request."""


class Refused(Exception):  # noqa: N818 - says what happened
    """The vault does not pass a request on."""

    def __init__(self, code: str, message: str | None = None, param: str | None = None) -> None:
        super().__init__(code)
        self.code = code
        self.message = message
        self.param = param

    def answer(self) -> Answer:
        """The refusal in Stripe's error envelope."""
        status, meaning = REFUSALS[self.code]
        headers = {"Retry-After": str(BUSY_RETRY_S)} if status == 503 else {}
        return error_answer(status, self.code, self.message or meaning, self.param, headers)


class AdminRefused(Exception):  # noqa: N818 - says what happened
    """A request to the vault's own endpoints that cannot be done."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(code)
        self.status = status
        self.code = code
        self.message = message

    def answer(self) -> Answer:
        return error_answer(self.status, self.code, self.message)


def error_answer(
    status: int,
    code: str,
    message: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    forwarded: bool = False,
) -> Answer:
    """An error of the vault's own, in the envelope that Stripe's clients read."""
    kind = "api_error" if status >= 500 else "invalid_request_error"
    error: dict[str, Any] = {"type": kind, "code": code, "message": f"vault: {message}"}
    if param is not None:
        error["param"] = param
    return json_answer(status, {"error": error}, headers, forwarded=forwarded, code=code)


def json_answer(
    status: int,
    value: object,
    headers: Mapping[str, str] | None = None,
    *,
    forwarded: bool = False,
    code: str | None = None,
) -> Answer:
    """JSON of the vault's own."""
    return Answer(
        status=status,
        body=json.dumps(value, separators=(",", ":")).encode(),
        forwarded=forwarded,
        headers={
            "Content-Type": "application/json",
            # Stripe's libraries would otherwise try some of these again by themselves.
            "Stripe-Should-Retry": "false",
            **(headers or {}),
        },
        code=code,
    )
