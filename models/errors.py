"""The one tree of errors: every failure that the project itself raises.

The message of each is one clear line that can be shown to a person: it names the rule or the
setting, never a secret and never an event's values. Every class can be rebuilt from its `args`
(so it survives pickling between processes).
"""

# ruff: noqa: N818 - these names say what happened; "Error" at the end would add nothing

from __future__ import annotations

from enum import StrEnum


class ChargebridgeError(Exception):
    """Something that this project refuses or cannot do; `str()` of it is one clear line."""


class ConfigurationError(ChargebridgeError):
    """A setting is missing, malformed or contradicts another one; the process must not start."""


class DeadLetterReason(StrEnum):
    """Why a delivery can never become a charge. The values are what the ledger stores."""

    INVALID_JSON = "invalid_json"
    """Not UTF-8, not JSON, NaN or Infinity, a name twice in one object, too deep."""
    INVALID_EVENT = "invalid_event"
    """JSON, but not a billing event."""
    TOO_LARGE = "too_large"
    PAYLOAD_CONFLICT = "payload_conflict"
    """The charge key of a recorded event with other money fields; the first event stands."""
    PAYLOAD_LOST = "payload_lost"
    """The stream was trimmed before the entry had been read."""


class EventRefused(ChargebridgeError):
    """A delivery can never become a charge.

    `reason` is a DeadLetterReason (or its value); `detail` names the field and the rule that it
    breaks, never its value.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class AmountRefused(ChargebridgeError):
    """An amount or a currency that Stripe would not take as a charge."""


class LedgerUnavailable(ChargebridgeError):
    """PostgreSQL did not confirm a read or a write; whether a write took effect is unknown."""


class StateForbids(ChargebridgeError):
    """The billing record's state does not allow what was asked for."""


class NotFound(ChargebridgeError):
    """No such billing record, dead letter, billing run or Stripe object."""
