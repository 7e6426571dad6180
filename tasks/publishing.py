"""Hands charge keys to the workers. What nobody takes, the sweep publishes again."""

from __future__ import annotations

import logging
from uuid import uuid4

from kombu.exceptions import OperationalError

from tasks.celery_app import app

logger = logging.getLogger(__name__)


def publish_charge(charge_key: str, source: str = "sweep") -> None:
    """Hand a charge key to the workers; the event is read from the ledger there.

    Raises OperationalError or OSError when the broker does not answer within its limit.
    """
    app.send_task(
        "tasks.charge",
        args=[charge_key],
        kwargs={"source": source},
        task_id=str(uuid4()),
        queue="charges",
        argsrepr=repr((charge_key,)),
        kwargsrepr=repr({"source": source}),
    )


def try_publish(charge_key: str, source: str) -> bool:
    """The same for what the ledger holds already: False when it is left to the sweep."""
    try:
        publish_charge(charge_key, source)
    except (OperationalError, OSError) as error:
        extra = {"charge_key": charge_key, "why": type(error).__name__}
        logger.warning("publish_left_to_sweep", extra=extra)
        return False
    return True
