"""What the store gives back, as values."""

from __future__ import annotations

from dataclasses import dataclass

from sandbox.stripe_simulator.messages import Json


@dataclass(frozen=True)
class SavedAnswer:
    """What an idempotency key answers until it is pruned."""

    fingerprint: bytes
    created: float
    status: int
    body: str
    request_id: str


@dataclass(frozen=True)
class Stored:
    """An intent or a charge with what the API does not show: its key, and whether it is done."""

    seq: int
    body: Json
    idempotency_key: str | None
    running: bool


@dataclass(frozen=True)
class LoggedRequest:
    """One line of the request log; `status` None means that the client got no status (yet)."""

    seq: int
    method: str
    path: str
    query: str
    idempotency_key: str | None
    charge_key: str | None
    body_sha256: str
    at: float
    status: int | None = None
    replayed: bool = False
