"""The charge task: a thin shell around the flow. Nothing of an event leaves it.

It never retries itself: the ledger schedules, the sweep and the bridges publish.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from celery.exceptions import SoftTimeLimitExceeded

from models.errors import EventRefused, LedgerUnavailable
from models.events import BillingEvent, event_from_json
from models.keys import charge_key as key_of
from models.ledger import boot_clock_s
from models.logs import describe_exception
from models.money import MAX_TOTAL_CENTS
from tasks.alarms import Alarm, ring
from tasks.cancel_earlier import EarlierObjects
from tasks.celery_app import app
from tasks.charge_flow import ChargeFlow, Order
from tasks.errors import ChargeFailed, OutcomeNotRecorded
from tasks.look_up import LookUp
from tasks.runtime import Runtime, runtime
from tasks.unrevokable import UnrevokableTask

RECORD_MARGIN_S: Final = 0.5
"""Repeats of writing an outcome end this long before the soft time limit."""
UNKNOWN_SOURCE: Final = "task"

logger = logging.getLogger(__name__)


@app.task(name="tasks.charge", base=UnrevokableTask)
def charge(charge_key: str, event: dict[str, Any] | None = None, source: str | None = None) -> str:
    """Take the next step for one charge key; returns the key and a word for what was done.

    `event` is a billing event's own JSON object; without it the step is taken from the ledger.
    Raises ChargeFailed, with a text that is safe to show, whatever went wrong.
    """
    began_s = boot_clock_s()
    logger.info("charge_started", extra={"charge_key": charge_key, "source": source})
    try:
        done = _run(charge_key, event, source, began_s)
    except SoftTimeLimitExceeded:
        raise _failed(charge_key, "time_limit") from None
    except LedgerUnavailable:
        raise _failed(charge_key, "ledger_unavailable") from None
    except OutcomeNotRecorded:
        raise _failed(charge_key, "outcome_not_recorded") from None
    except ChargeFailed as failed:
        raise _failed(charge_key, str(failed)) from None
    except Exception as error:
        # Its text could quote an event: only its kind and place are told.
        raise _failed(charge_key, describe_exception(error)) from None
    logger.info("charge_done", extra={"charge_key": charge_key, "done": done})
    return f"{charge_key} {done}"


def _run(charge_key: str, event: dict[str, Any] | None, source: str | None, began_s: float) -> str:
    here = runtime()
    deadline_s = began_s + here.settings.limits.soft_limit_s - RECORD_MARGIN_S
    order = Order(
        charge_key=charge_key,
        event=None if event is None else checked_event(charge_key, event, here),
        source=source or UNKNOWN_SOURCE,
    )
    return flow_of(here).run(order, deadline_s)


def flow_of(here: Runtime) -> ChargeFlow:
    """The charge flow over a process's runtime."""
    look_up = LookUp(here.ledger, here.reads, here.gateway, here.settings.limits, holds=here.holds)
    earlier = EarlierObjects(here.ledger, here.reads, here.gateway, here.holds)
    return ChargeFlow(here.ledger, here.gateway, here.settings, look_up, earlier)


def checked_event(charge_key: str, event: dict[str, Any], here: Runtime) -> BillingEvent:
    """The event, if it is one and the key is its own. Raises ChargeFailed.

    The limit of an amount is the bridge's: what it has let in must not be left without a record.
    """
    try:
        decoded = event_from_json(event, max_amount_cents=MAX_TOTAL_CENTS)
    except EventRefused as refused:
        ring(Alarm.EVENT_REFUSED, charge_key=charge_key, why=refused.detail)
        raise ChargeFailed(f"invalid_event: {refused.detail}") from None
    expected = key_of(decoded.customer_id, decoded.billing_period, here.settings.charge_namespace)
    if expected != charge_key:
        ring(Alarm.KEY_MISMATCH, charge_key=charge_key, expected=expected)
        raise ChargeFailed("key_mismatch")
    return decoded


def _failed(charge_key: str, why: str) -> ChargeFailed:
    logger.warning("charge_failed", extra={"charge_key": charge_key, "why": why})
    return ChargeFailed(f"{charge_key} {why}")
