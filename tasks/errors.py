"""What the tasks raise. Each text is safe to show: no event, no key, nothing of a reply."""

# ruff: noqa: N818 - these names say what happened; "Error" at the end would add nothing

from __future__ import annotations

from models.errors import ChargebridgeError


class ChargeFailed(ChargebridgeError):
    """A charge task could not do its step; its record says where it stands."""


class SweepFailed(ChargebridgeError):
    """The sweep ended early; the next one goes on."""


class RechargeFailed(ChargebridgeError):
    """A recharge was not started; the ledger is as it was."""


class ReconcileFailed(ChargebridgeError):
    """A reconciliation ended early; it can be run again."""


class OutcomeNotRecorded(ChargebridgeError):
    """The ledger did not confirm the outcome in time; the record stays `sent`."""


class StripeUnavailable(ChargebridgeError):
    """A read from Stripe was not answered as it should be; `code` says how, for the ledger."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class CustomerUnknown(StripeUnavailable):
    """A list was refused because there is no such customer (any more)."""


class NotSent(ChargebridgeError):
    """The last check before the write refused; no byte was written."""


class DeadlinePassed(OSError):
    """The call's time is over."""
