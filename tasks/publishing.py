"""Hands charge keys to the workers. What nobody takes, the sweep publishes again."""

from __future__ import annotations

import logging
from typing import Final
from uuid import uuid4

from kombu.exceptions import OperationalError

from tasks.celery_app import app

QUEUE: Final = "charges"

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
        queue=QUEUE,
        argsrepr=repr((charge_key,)),
        kwargsrepr=repr({"source": source}),
    )


def charges_waiting() -> int:
    """Charges on their queue that no worker has taken yet.

    Raises OperationalError or OSError when the broker does not answer within its limit.
    """
    with app.connection_or_acquire(None) as connection:
        try:
            found = connection.default_channel.queue_declare(QUEUE, passive=True)
        except connection.channel_errors:
            return 0  # a queue with nothing on it does not exist
        except connection.connection_errors as error:
            # Not its text: a broker's message may carry its address and password.
            raise OperationalError(type(error).__name__) from None
        return int(found.message_count)


def try_publish(charge_key: str, source: str) -> bool:
    """The same for what the ledger holds already: False when it is left to the sweep."""
    try:
        publish_charge(charge_key, source)
    except (OperationalError, OSError) as error:
        extra = {"charge_key": charge_key, "why": type(error).__name__}
        logger.warning("publish_left_to_sweep", extra=extra)
        return False
    return True
