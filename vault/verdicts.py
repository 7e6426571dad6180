"""What a hold's state and a reply mean, as pure functions: why nothing was taken, what is known."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, assert_never

from models.outcomes import OutcomeKind
from vault.answers import Refused


class HoldState(StrEnum):
    RESERVED = "reserved"
    """The money is set aside; certain that nothing was sent for it yet."""
    SENT = "sent"
    """Under way, or an intent that is still open."""
    SETTLED = "settled"
    RELEASED = "released"
    UNKNOWN = "unknown"
    """It may have taken money; it goes on holding."""


class Verdict(StrEnum):
    """What is known of a hold's money."""

    SETTLED = "settled"
    OPEN = "open"
    """The intent may still take it."""
    FAILED = "failed"
    """It did not, and cannot any more."""
    CANCELED = "canceled"
    """The same, by Stripe's own last word about the object."""
    UNKNOWN = "unknown"


def judge(row: Mapping[str, Any], amount_cents: int) -> int | None:
    """What a try to take a hold came to: its id, None to try again, or Refused with the reason.

    A refusal for good is never guessed: when what was found does not explain that nothing was
    taken, somebody else changed it in between.
    """
    if row["permitted"] is None:
        raise Refused("key_unknown")
    if not row["permitted"]:
        raise Refused("endpoint_refused", "the vault key is not good for this call")
    if not row["run_matches"]:
        if not row["run_exists"]:
            raise Refused("no_billing_run")
        raise Refused("endpoint_refused", "the vault key is another run's", "metadata[billing_run]")
    if row["too_late"]:
        raise Refused("busy", "the sender's time is over")
    if row["taken_id"] is not None:
        return int(row["taken_id"])
    if row["hold_id"] is not None:
        return _judge_replay(row, amount_cents)
    for code, applies in (
        ("key_revoked", row["revoked"]),
        ("run_closed", row["run_state"] == "closed"),
        ("run_closing", row["run_state"] == "closing"),
        ("key_expired", row["expired"]),
        ("other_hold_live", row["has_rival"]),
        ("over_cap", row["free_cents"] < amount_cents),
    ):
        if applies:
            raise Refused(code)
    return None


def _judge_replay(row: Mapping[str, Any], amount_cents: int) -> int | None:
    if not row["same_request"]:
        raise Refused("endpoint_refused", "the idempotency key belongs to another request")
    if not row["in_window"]:
        raise Refused("resend_window")
    if not row["same_upstream"]:
        raise Refused("upstream_key_changed")
    if row["hold_state"] != HoldState.RELEASED:
        return int(row["hold_id"])
    if row["has_rival"]:
        raise Refused("other_hold_live")
    if row["free_cents"] < amount_cents:
        raise Refused("over_cap")
    return None


def verdict_of(kind: OutcomeKind) -> Verdict:
    """What an outcome says of the held money."""
    match kind:
        case OutcomeKind.CHARGED:
            return Verdict.SETTLED
        case OutcomeKind.PROCESSING | OutcomeKind.REQUIRES_ACTION:
            return Verdict.OPEN
        case OutcomeKind.CARD_DECLINED | OutcomeKind.REJECTED | OutcomeKind.NOT_EXECUTED:
            return Verdict.FAILED
        case OutcomeKind.UNKNOWN | OutcomeKind.UNKNOWN_LOOK_UP | OutcomeKind.UNRECOGNISED:
            return Verdict.UNKNOWN
        case OutcomeKind.BLOCKED:
            # The vault's own word; Stripe has none like it.
            return Verdict.UNKNOWN
        case _:
            assert_never(kind)
