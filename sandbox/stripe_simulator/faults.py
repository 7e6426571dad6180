"""Faults: which requests they hit, at which stage, and what they do to the reply.

Stages: `before` is ahead of the idempotency layer, nothing is executed or saved; at `after_claim`
the key is in flight and no money is taken; at `after_commit` the money is taken and the answer is
saved, so that only the reply is spoiled (but an `http_500` there is the saved answer).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from sandbox.stripe_simulator.messages import Json, Reply, Request, StripeError, encode

Stage = Literal["before", "after_claim", "after_commit"]
FaultKind = Literal[
    "timeout",
    "reset",
    "truncate",
    "http_500",
    "http_429",
    "lock_timeout",
    "html_502",
    "latency",
]

CREATE_PATHS = frozenset({"/v1/payment_intents", "/v1/charges"})
MATCH_FIELDS = frozenset({"method", "path", "customer", "idempotency_key"})
DEFAULT_TIMEOUT_S = 3600.0
DEFAULT_LATENCY_S = 1.0
MAX_FAULTS = 1000


@dataclass(frozen=True)
class Fault:
    """One fault of the list; `left` counts down from `times`. `seconds` None is the default."""

    match: dict[str, str]
    stage: Stage
    kind: FaultKind
    seconds: float | None
    times: int
    left: int

    @property
    def pause_s(self) -> float:
        """How long a latency or a timeout lasts."""
        if self.seconds is not None:
            return self.seconds
        return DEFAULT_LATENCY_S if self.kind == "latency" else DEFAULT_TIMEOUT_S

    def hits(self, request: Request, given: Mapping[str, str]) -> bool:
        """Whether this request is meant. A GET must be asked for by method or by a path of its
        own, so that a fault for a create is never used up by a read of the same customer."""
        wanted = self.match
        path = wanted.get("path")
        if path is not None and path != request.path:
            return False
        method = wanted.get("method")
        if method is not None:
            if method != request.method:
                return False
        elif not _meant_without_method(request, wanted):
            return False
        key = wanted.get("idempotency_key")
        if key is not None and key != request.headers.get("idempotency-key"):
            return False
        customer = wanted.get("customer")
        return customer is None or customer == _customer(request, given)


def _meant_without_method(request: Request, wanted: Mapping[str, str]) -> bool:
    if request.method == "GET":
        return "path" in wanted and request.path not in CREATE_PATHS
    return bool(wanted.keys() & {"path", "idempotency_key"}) or request.path in CREATE_PATHS


def _customer(request: Request, given: Mapping[str, str]) -> str | None:
    if request.path.startswith("/v1/customers/"):
        return request.path.split("/")[3]
    return given.get("customer")


def parse_fault(body: Any) -> Fault:
    """A fault from the admin side's JSON. Raises ValueError with one clear line."""
    if not isinstance(body, dict) or set(body) - {"match", "stage", "kind", "seconds", "times"}:
        raise ValueError("a fault has match, stage, kind, seconds and times")
    match = body.get("match") or {}
    if not isinstance(match, dict) or set(match) - MATCH_FIELDS:
        raise ValueError(f"match takes {', '.join(sorted(MATCH_FIELDS))}")
    match = {name: value for name, value in match.items() if value is not None}
    if not all(isinstance(value, str) for value in match.values()):
        raise ValueError("match takes strings")
    if "method" in match:
        match["method"] = match["method"].upper()
    stage: Any = body.get("stage", "before")
    kind: Any = body.get("kind")
    if stage not in get_args(Stage):
        raise ValueError(f"stage is one of {', '.join(get_args(Stage))}")
    if kind not in get_args(FaultKind):
        raise ValueError(f"kind is one of {', '.join(get_args(FaultKind))}")
    seconds, times = body.get("seconds"), body.get("times", 1)
    if seconds is not None and (type(seconds) not in {int, float} or not 0 <= seconds <= 1e6):
        raise ValueError("seconds is a number, 0 or more")
    if type(times) is not int or times < 1:
        raise ValueError("times is a whole number, 1 or more")
    return Fault(match, stage, kind, seconds, times, times)


class FaultList:
    """The faults in the order they were given; the first with times left that matches wins."""

    def __init__(self, stored: str | None = None) -> None:
        self._faults = [Fault(**fields) for fields in json.loads(stored or "[]")]

    def add(self, fault: Fault) -> None:
        """Appends a fault; used-up ones make room. Raises ValueError when there are too many."""
        if len(self._faults) >= MAX_FAULTS:
            self._faults = [known for known in self._faults if known.left > 0]
        if len(self._faults) >= MAX_FAULTS:
            raise ValueError(f"at most {MAX_FAULTS} faults")
        self._faults.append(fault)

    def clear(self) -> None:
        """Forgets all faults."""
        self._faults.clear()

    def first(self, request: Request, given: Mapping[str, str]) -> Fault | None:
        """The fault meant for this request, not yet used up."""
        if not self._faults:
            return None
        return next((f for f in self._faults if f.left > 0 and f.hits(request, given)), None)

    def use(self, fault: Fault) -> None:
        """Counts one use of a fault that `first` returned."""
        for place, known in enumerate(self._faults):
            if known is fault:
                self._faults[place] = replace(known, left=known.left - 1)
                return

    def listed(self) -> list[Json]:
        """The faults as JSON objects."""
        return [asdict(fault) for fault in self._faults]

    def stored(self) -> str:
        """The faults as text, for the state file."""
        return encode(self.listed())


def spoiled(fault: Fault, reply: Reply | None) -> Reply:
    """What the client gets in place of `reply` (None: there was nothing to say yet).

    Not for latency and timeout, which take time.
    """
    if fault.kind == "reset":
        return Reply(0, "", delivery="reset")
    if fault.kind == "truncate":
        whole = reply or Reply(200, encode({"object": "payment_intent", "status": "processing"}))
        return replace(whole, delivery="truncate")
    if fault.kind == "html_502":
        page = "<html><head><title>502 Bad Gateway</title></head><body>Bad Gateway</body></html>"
        return Reply(502, page, content_type="text/html")
    if fault.kind == "http_429":
        error = StripeError(429, "Too many requests hit the API.", code="rate_limit")
        return Reply(429, error.body, {"Stripe-Rate-Limited-Reason": "global-rate"})
    if fault.kind == "lock_timeout":
        return Reply(429, lock_timeout().body)
    return Reply(500, server_error().body)


def lock_timeout() -> StripeError:
    """The object is in use by another request."""
    return StripeError(
        429,
        "This object cannot be accessed right now because another request is using it.",
        code="lock_timeout",
    )


def server_error() -> StripeError:
    """Stripe's own fault: the outcome is indeterminate for the client."""
    return StripeError(500, "An unknown error occurred", kind="api_error")
