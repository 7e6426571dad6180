"""Every time limit of the pipeline, and what they must be to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from models.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Limits:
    """Every time limit of the pipeline, in seconds, and the counts that go with them.

    Each can be set by an environment variable of its name in capitals (`LEASE_S=45`);
    `LIMITS=fast` chooses the short set that the sandbox's demo and the tests use.
    """

    preparation_s: float = 6
    call_s: float = 30
    """The worker's whole call to Stripe: a deadline, not a pause between two reads."""
    soft_limit_s: float = 38
    hard_limit_s: float = 43
    lease_s: float = 45
    vault_upstream_s: float = 80
    backoff_base_s: float = 2
    backoff_cap_s: float = 60
    touch_s: float = 20
    """How often a bridge extends its lease on a delivery it holds."""
    msg_timeout_s: float = 60
    min_idle_s: float = 60
    sweep_interval_s: float = 5
    redispatch_after_s: float = 30
    park_after_s: float = 90
    park_delay_s: float = 15
    visibility_timeout_s: float = 300
    proof_of_absence_s: float = 900
    resend_window_s: float = 20 * 3600
    poll_processing_s: float = 60
    """First pause before an intent that is `processing` is asked about; it grows."""
    poll_processing_cap_s: float = 6 * 3600
    poll_action_s: float = 3600
    """Between two looks at an intent that waits for the customer."""
    poll_for_s: float = 14 * 24 * 3600
    """How long an open intent is asked about before a person decides."""
    max_unknowns: int = 5
    """Unknown outcomes after which the record is looked up instead of sent again."""
    max_claims: int = 10
    """Claims without any outcome after which a person decides."""


FAST_LIMITS: Final = Limits(
    preparation_s=1,
    call_s=5,
    soft_limit_s=7,
    hard_limit_s=8,
    lease_s=9,
    vault_upstream_s=15,
    backoff_cap_s=5,
    touch_s=3,
    msg_timeout_s=12,
    min_idle_s=12,
    sweep_interval_s=1,
    redispatch_after_s=6,
    park_after_s=18,
    park_delay_s=3,
    visibility_timeout_s=30,
    proof_of_absence_s=30,
    poll_processing_s=1,
    poll_processing_cap_s=5,
    poll_action_s=3,
)
MAX_RESEND_WINDOW_S: Final = 23 * 3600
"""Stripe may forget an idempotency key at 24 h; an hour is kept for clocks that differ."""


MAX_CLOCK_OFF_S: Final = 900
"""What the database's clock may differ by from a host's. Every margin of ours is wider."""


def check_limits(limits: Limits, *, warn_only: bool = False) -> tuple[str, ...]:
    """Hold the limits against each other; returns the warnings.

    Limits whose order guards money are refused with ConfigurationError (unless
    `warn_only`, for tests); limits whose order only saves work are warned about.
    """
    named = _Named(limits)
    broken = [
        text
        for holds, text in (
            named.sum_below("preparation_s", "call_s", below="soft_limit_s"),
            named.below("soft_limit_s", "hard_limit_s"),
            named.below("hard_limit_s", "lease_s"),
            named.sum_below("lease_s", "vault_upstream_s", below="proof_of_absence_s"),
            (
                limits.resend_window_s <= MAX_RESEND_WINDOW_S,
                f"RESEND_WINDOW_S ({limits.resend_window_s:g}) must not pass "
                f"MAX_RESEND_WINDOW_S ({MAX_RESEND_WINDOW_S:g})",
            ),
        )
        if not holds
    ]
    if broken and not warn_only:
        raise ConfigurationError(broken[0])
    wasteful = [
        text
        for holds, text in (
            named.below("lease_s", "msg_timeout_s"),
            named.below("lease_s", "min_idle_s"),
            named.below("touch_s", "msg_timeout_s", factor=0.5),
            named.below("touch_s", "min_idle_s", factor=0.5),
            named.below("hard_limit_s", "visibility_timeout_s"),
        )
        if not holds
    ]
    return tuple(broken + wasteful)


class _Named:
    """Comparisons of limits that say, when they fail, which settings to change."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def _of(self, name: str) -> float:
        return float(getattr(self._limits, name))

    def below(self, low: str, high: str, factor: float = 1.0) -> tuple[bool, str]:
        bound = "" if factor == 1.0 else f"{factor:g} x "
        return (
            self._of(low) < factor * self._of(high),
            f"{low.upper()} ({self._of(low):g}) must be less than "
            f"{bound}{high.upper()} ({self._of(high):g})",
        )

    def sum_below(self, first: str, second: str, *, below: str) -> tuple[bool, str]:
        total = self._of(first) + self._of(second)
        return (
            total < self._of(below),
            f"{first.upper()} + {second.upper()} ({total:g}) must be less than "
            f"{below.upper()} ({self._of(below):g})",
        )
