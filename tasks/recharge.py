"""The recharge task: `celery call` and Flower's API can ask for it as well as our command."""

from __future__ import annotations

import logging
from typing import Any

from models.errors import ChargebridgeError, LedgerUnavailable
from models.ledger_actions import LedgerActions
from models.logs import describe_exception
from tasks.celery_app import app
from tasks.errors import RechargeFailed
from tasks.operators import task_actor
from tasks.publishing import try_publish
from tasks.recharge_flow import Approval, Recharges
from tasks.runtime import Runtime, runtime
from tasks.unrevokable import UnrevokableTask

logger = logging.getLogger(__name__)


@app.task(name="tasks.recharge", base=UnrevokableTask, bind=True)
def recharge(  # noqa: PLR0917 - the order is what publishers rely on
    self: Any,
    customer_id: str,
    billing_period: str,
    from_epoch: int,
    reason: str,
    payment_method: str | None = None,
    request_id: str | None = None,
    force: bool = False,
) -> str:
    """Start the epoch after `from_epoch` of one record; returns its charge key and new epoch.

    `request_id` (the task's own id if not given) makes a repeat of the same request harmless.
    `force` tries a card again that was declined for good. Raises RechargeFailed, with a text
    that is safe to show, when nothing was started.
    """
    request_id = request_id or str(self.request.id)
    try:
        _check_types(from_epoch, customer_id, billing_period, reason)
        approval = Approval(reason, payment_method, bool(force))
        started = recharges(runtime()).start(
            customer_id, billing_period, approval, from_epoch=from_epoch, request_id=request_id
        )
    except LedgerUnavailable:
        raise _failed(request_id, "ledger_unavailable") from None
    except ChargebridgeError as refused:
        raise _failed(request_id, str(refused)) from None
    except Exception as error:
        raise _failed(request_id, describe_exception(error)) from None
    word = "already" if started.already else "started"
    return f"{started.record.charge_key} {word} epoch {started.record.attempt_epoch}"


def recharges(here: Runtime) -> Recharges:
    """Recharges over a process's runtime."""
    actions = LedgerActions(here.engine, here.settings.limits, task_actor(here.settings))
    return Recharges(actions, here.reads, lambda key: try_publish(key, "recharge"))


def _check_types(epoch: object, *texts: object) -> None:
    if not all(isinstance(value, str) for value in texts):
        raise RechargeFailed("customer_id, billing_period and reason are texts")
    if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:
        raise RechargeFailed("from_epoch is a whole number, 0 or more")


def _failed(request_id: str, why: str) -> RechargeFailed:
    logger.warning("recharge_failed", extra={"request_id": request_id, "why": why})
    return RechargeFailed(why)
