"""One /v1 request on its way: what was read of it, who sends it, and its reply's headers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sandbox.stripe_simulator.messages import Reply, Request, StripeError
from sandbox.stripe_simulator.rows import LoggedRequest

API_VERSION = "2026-10-28.endive"

_SECRET_KEY = re.compile(r"(?:sk|rk)_test_\w+\Z", re.ASCII)


@dataclass
class Call:
    """A request, its parameters, and its line in the request log."""

    request: Request
    request_id: str
    line: LoggedRequest
    given: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str | None:
        """The idempotency key; GET and DELETE have none."""
        if self.request.method != "POST":
            return None
        return self.request.headers.get("idempotency-key") or None

    def fingerprint(self) -> bytes:
        """Stands for the endpoint and its parameters, in whatever order they were sent."""
        seen = [self.request.method, self.request.path]
        for pair in sorted(self.given.items()):
            seen.extend(pair)
        return hashlib.sha256("\0".join(seen).encode()).digest()


def authorize(request: Request) -> None:
    """Any test key is taken, but for two kinds that tests can ask for."""
    key = request.api_key()
    if key is None:
        raise StripeError(401, "You did not provide an API key.")
    if not _SECRET_KEY.match(key) or key.startswith(("sk_test_bad", "rk_test_bad")):
        raise StripeError(401, "Invalid API Key provided.")
    if key.startswith(("sk_test_forbidden", "rk_test_forbidden")):
        raise StripeError(403, "The provided key does not have the required permissions.")


def with_headers(reply: Reply, call: Call) -> Reply:
    sent = call.request.headers
    headers = {
        "Request-Id": call.request_id,
        "Stripe-Version": sent.get("stripe-version", API_VERSION),
        **reply.headers,
    }
    if call.key is not None:
        headers["Idempotency-Key"] = call.key
    return replace(reply, headers=headers)
