"""How long a claim still allows to send, on the clock that also runs while the machine sleeps."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from models.ledger import boot_clock_s
from tasks.errors import NotSent

if TYPE_CHECKING:
    from models.limits import Limits
    from models.records import Claim


def send_until_s(claim: Claim, limits: Limits) -> float:
    """The moment (boot-time clock) at which the lease or the resend window ends."""
    record = claim.record
    assert record.first_sent_at is not None, "a claim marks the send"
    assert record.last_sent_at is not None, "a claim marks the send"
    window_end = record.first_sent_at + timedelta(seconds=limits.resend_window_s)
    # The claim's commit and this host's clock met no later than the lease was counted from.
    claimed_s = claim.boot_deadline_s - limits.lease_s
    return min(
        claim.boot_deadline_s, claimed_s + (window_end - record.last_sent_at).total_seconds()
    )


def send_guard(claim: Claim, limits: Limits) -> Callable[[], None]:
    """A check for right before the write: raises NotSent once the claim allows no more."""
    until_s = send_until_s(claim, limits)

    def check() -> None:
        if boot_clock_s() >= until_s:
            raise NotSent("the lease or the resend window is over")

    return check


def call_deadline_s(claim: Claim, limits: Limits) -> float:
    """When the call has to be over: its own limit, and never later than the lease."""
    return min(boot_clock_s() + limits.call_s, claim.boot_deadline_s)
