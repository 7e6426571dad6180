"""What one call to Stripe can come to, and the one function that judges a reply.

The judgement is about the *original* request under the idempotency key, not about the last
reply alone: once an earlier try of the same key ended unknown, a refusal of the repeat says
nothing about whether the first one took money.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, assert_never

from models.states import State


class ReplyKind(StrEnum):
    """How the exchange itself went, before anything in the reply is judged."""

    ANSWER = "answer"
    """A whole reply that could be read: an object, or an error envelope."""
    NOT_CONNECTED = "not_connected"
    """The connection was never made, so no byte of the request was written."""
    NOT_SENT = "not_sent"
    """Our own last check before the write refused: lease or window were over."""
    BROKEN = "broken"
    """Timeout, reset, truncated, not JSON, or anything else that proves nothing."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One exchange with Stripe (or with the vault in front of it) as plain values."""

    kind: ReplyKind
    http_status: int | None = None
    object_status: str | None = None
    """Status of the intent or charge in a 2xx; an uncaptured charge says requires_capture."""
    payment_intent_id: str | None = None
    charge_id: str | None = None
    error_type: str | None = None
    error_code: str | None = None
    decline_code: str | None = None
    error_message: str | None = None
    request_id: str | None = None
    replayed: bool = False
    forwarded: bool | None = None
    """The vault's own word whether it passed the request on; None without that header."""


@dataclass(frozen=True, slots=True)
class History:
    """What is known of earlier sends under the same idempotency key."""

    earlier_unknown: bool
    vaulted: bool
    """Whether the call goes through a vault, so that its header must be there."""


class OutcomeKind(StrEnum):
    CHARGED = "charged"
    PROCESSING = "processing"
    REQUIRES_ACTION = "requires_action"
    CARD_DECLINED = "card_declined"
    REJECTED = "rejected"
    BLOCKED = "blocked"
    NOT_EXECUTED = "not_executed"
    """Certain that Stripe did nothing: the same key later."""
    UNKNOWN = "unknown"
    """The charge may exist: the same key and bytes later."""
    UNKNOWN_LOOK_UP = "unknown_look_up"
    """The charge may exist and the idempotency store is of no more use: ask before acting."""
    UNRECOGNISED = "unrecognised"
    """A success whose status we do not know: a person decides."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A judged reply: what the ledger records."""

    kind: OutcomeKind
    http_status: int | None = None
    payment_intent_id: str | None = None
    charge_id: str | None = None
    error_code: str | None = None
    decline_code: str | None = None
    error_message: str | None = None
    request_id: str | None = None
    replayed: bool = False

    @property
    def state(self) -> State:
        """The state that this outcome puts a `sent` record into."""
        return state_after(self.kind)

    @property
    def is_unknown(self) -> bool:
        return self.kind in (OutcomeKind.UNKNOWN, OutcomeKind.UNKNOWN_LOOK_UP)


def state_after(kind: OutcomeKind) -> State:
    """The state that a `sent` record goes to with an outcome of this kind."""
    match kind:
        case OutcomeKind.CHARGED:
            return State.CHARGED
        case OutcomeKind.PROCESSING:
            return State.PROCESSING
        case OutcomeKind.REQUIRES_ACTION:
            return State.REQUIRES_ACTION
        case OutcomeKind.CARD_DECLINED:
            return State.CARD_DECLINED
        case OutcomeKind.REJECTED:
            return State.REJECTED
        case OutcomeKind.BLOCKED:
            return State.BLOCKED
        case OutcomeKind.NOT_EXECUTED:
            return State.RESERVED
        case OutcomeKind.UNKNOWN | OutcomeKind.UNKNOWN_LOOK_UP:
            return State.SENT
        case OutcomeKind.UNRECOGNISED:
            return State.REVIEW
        case _:
            assert_never(kind)


VAULT_BLOCKS: Final = frozenset({"over_cap", "key_revoked", "run_closed"})
"""The vault's refusals for good."""

VAULT_LOOK_UPS: Final = frozenset({"resend_window", "upstream_key_changed"})
"""The vault's refusals that say nothing of an earlier forward: ask Stripe."""

_OBJECT_STATUS: Final = {
    "succeeded": OutcomeKind.CHARGED,
    "processing": OutcomeKind.PROCESSING,
    "pending": OutcomeKind.PROCESSING,
    "requires_action": OutcomeKind.REQUIRES_ACTION,
    "requires_payment_method": OutcomeKind.CARD_DECLINED,
    "canceled": OutcomeKind.CARD_DECLINED,
    "failed": OutcomeKind.CARD_DECLINED,
}
"""Statuses of intents and of charges; one that is not here is never taken as paid."""


def kind_of_status(object_status: str | None) -> OutcomeKind:
    """What an intent's or charge's own status says; unrecognised unless it is known."""
    return _OBJECT_STATUS.get(object_status or "", OutcomeKind.UNRECOGNISED)


def classify(reply: Reply, history: History) -> Outcome:
    """Judge what a reply proves about the original request under its idempotency key."""
    kind = _judge(reply, history)
    return Outcome(
        kind=kind,
        http_status=reply.http_status,
        payment_intent_id=reply.payment_intent_id,
        charge_id=reply.charge_id,
        error_code=reply.error_code,
        decline_code=reply.decline_code,
        error_message=reply.error_message,
        request_id=reply.request_id,
        replayed=reply.replayed,
    )


def _judge(reply: Reply, history: History) -> OutcomeKind:
    match reply.kind:
        case ReplyKind.BROKEN:
            return OutcomeKind.UNKNOWN
        case ReplyKind.NOT_CONNECTED | ReplyKind.NOT_SENT:
            return _if_first(OutcomeKind.NOT_EXECUTED, history)
        case ReplyKind.ANSWER:
            return _judge_answer(reply, history)
        case _:
            assert_never(reply.kind)


def _judge_answer(reply: Reply, history: History) -> OutcomeKind:
    if history.vaulted and reply.forwarded is None:
        # Something between us and the vault answered: it proves nothing.
        return OutcomeKind.UNKNOWN
    if history.vaulted and not reply.forwarded:
        return _judge_refusal(reply, history)
    status = reply.http_status or 0
    if 200 <= status < 300:
        return kind_of_status(reply.object_status)
    if status == 402:
        return _judge_card_error(reply)
    if status in (400, 404):
        return _judge_invalid_request(reply, history)
    if status in (401, 403, 429):
        return _if_first(OutcomeKind.NOT_EXECUTED, history)
    if status >= 500 and reply.replayed:
        # Stripe saved the failure itself as the key's answer: it will never say more.
        return OutcomeKind.UNKNOWN_LOOK_UP
    return OutcomeKind.UNKNOWN


def _judge_refusal(reply: Reply, history: History) -> OutcomeKind:
    if reply.error_code in VAULT_LOOK_UPS:
        return OutcomeKind.UNKNOWN_LOOK_UP
    if reply.error_code in VAULT_BLOCKS:
        return _if_first(OutcomeKind.BLOCKED, history)
    return _if_first(OutcomeKind.NOT_EXECUTED, history)


def _judge_card_error(reply: Reply) -> OutcomeKind:
    if "authentication_required" in (reply.error_code, reply.decline_code):
        return OutcomeKind.REQUIRES_ACTION
    return OutcomeKind.CARD_DECLINED


def _judge_invalid_request(reply: Reply, history: History) -> OutcomeKind:
    if reply.error_type == "idempotency_error":
        return OutcomeKind.UNKNOWN_LOOK_UP
    if history.earlier_unknown and not reply.replayed:
        return OutcomeKind.UNKNOWN
    return OutcomeKind.REJECTED


def _if_first(kind: OutcomeKind, history: History) -> OutcomeKind:
    """A refusal of a repeat says nothing about the first send, whose outcome stays open."""
    return OutcomeKind.UNKNOWN if history.earlier_unknown else kind
