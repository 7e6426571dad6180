"""Tasks that nobody can revoke.

A revoked id is thrown away unseen, and acknowledged, by every worker for hours. For a charge
that would be a delivery that nobody answers, so revoking does nothing here: whoever wants an
event not to be charged voids its record in the ledger.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from celery import Task
from celery.worker.control import control_command
from celery.worker.request import Request

CLOSED_CHANNEL_ERRORS: Final = (AttributeError,)
"""What an ack over a connection that was lost and closed raises, beside connection errors: the
closed transport has forgotten its client. The message comes again, and the ledger knows it."""
logger = logging.getLogger(__name__)

REFUSAL: Final = {"error": "tasks are not revoked here; void the billing record instead"}


class UnrevokableRequest(Request):
    """A message whose task always runs, unless it has expired."""

    def __init__(self, *args: Any, connection_errors: Any = None, **kwargs: Any) -> None:
        errors = (*(connection_errors or ()), *CLOSED_CHANNEL_ERRORS)
        super().__init__(*args, connection_errors=errors, **kwargs)

    def revoked(self) -> bool:
        """True only for a message past its own expiry, which is acknowledged unrun.

        By nobody else: left unanswered, two of them would fill a small worker's prefetch for good.
        """
        if self._already_revoked:
            return True
        if not (self.expires and self.maybe_expire()):
            return False
        logger.warning("task_expired", extra={"task": self.name, "task_id": self.id})
        self._announce_revoked("expired", False, None, True)
        return True

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """Leave a running task alone: killing it would turn its answer into an unknown."""


class UnrevokableTask(Task):
    """Base of every task of ours."""

    abstract = True
    Request = UnrevokableRequest


def _refuse(state: Any, **_: Any) -> dict[str, str]:
    """Refused: tasks are not revoked here."""
    return REFUSAL


def refuse_revocation() -> None:
    """Answer the remote commands that would revoke or kill tasks with a refusal."""
    for name in ("revoke", "terminate", "revoke_by_stamped_headers"):
        control_command(name=name)(_refuse)
