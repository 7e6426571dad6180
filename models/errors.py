"""The one tree of errors: every failure that the project itself raises.

The message of each is one clear line that can be shown to a person: it names the rule or the
setting, never a secret and never an event's values. Every class can be rebuilt from its `args`
(so it survives pickling between processes).
"""

from __future__ import annotations


class ChargebridgeError(Exception):
    """Something that this project refuses or cannot do; `str()` of it is one clear line."""


class ConfigurationError(ChargebridgeError):
    """A setting is missing, malformed or contradicts another one; the process must not start."""


class EventRefused(ChargebridgeError):
    """A delivery can never become a charge.

    `reason` is the dead letter's reason (`invalid_json`, `invalid_event`, `too_large` …);
    `detail` names the field and the rule that it breaks, never its value.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class LedgerUnavailable(ChargebridgeError):
    """PostgreSQL did not confirm a read or a write; whether a write took effect is unknown."""


class StateForbids(ChargebridgeError):
    """The billing record's state does not allow what was asked for."""


class NotFound(ChargebridgeError):
    """No such billing record, dead letter, billing run or Stripe object."""
