"""The reconcile task: a run's ledger against Stripe, without an expectation, told in the log."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from models.billing_runs import BillingRuns
from models.errors import ChargebridgeError
from models.ledger_actions import LedgerActions
from models.logs import describe_exception
from tasks.celery_app import app
from tasks.errors import ReconcileFailed
from tasks.operators import task_actor
from tasks.reconcile_flow import Reconciliation
from tasks.runtime import runtime
from tasks.unrevokable import UnrevokableTask

if TYPE_CHECKING:
    from tasks.runtime import Runtime

RECONCILE_S = 3600
"""A run's whole list may take this long; nothing is held meanwhile, and it can be run again."""

logger = logging.getLogger(__name__)


@app.task(
    name="tasks.reconcile",
    base=UnrevokableTask,
    # It outlives the visibility timeout, and a second run of it would help nobody.
    acks_late=False,
    soft_time_limit=RECONCILE_S,
    time_limit=RECONCILE_S + 60,
)
def reconcile(billing_run: str) -> str:
    """Hold a run's ledger against Stripe, adopt what it lost; returns the last line of a report.

    Raises ReconcileFailed, with a text that is safe to show.
    """
    here = runtime()
    try:
        with _alone(), reconciliation(here, billing_run, task_actor(here.settings)) as work:
            work.run()
            summary = work.summary()
    except ChargebridgeError as error:
        raise ReconcileFailed(str(error)) from None
    except Exception as error:
        raise ReconcileFailed(describe_exception(error)) from None
    counts = {f"lines_{verdict}": count for verdict, count in summary.counts.items()}
    extra = {"billing_run": billing_run, "adopted": summary.adopted, **counts}
    logger.info("reconcile_done", extra=extra)
    return summary.last_line


@contextmanager
def _alone() -> Iterator[None]:
    """One on each host: sweeps and recharges keep a slot to themselves."""
    path = Path(tempfile.gettempdir()) / f"chargebridge-reconcile-{os.getuid()}.lock"
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ReconcileFailed("another reconciliation is running on this host") from None
        yield


@contextmanager
def reconciliation(here: Runtime, billing_run: str, actor: str) -> Iterator[Reconciliation]:
    """A reconciliation over a process's runtime, closed afterwards."""
    work = Reconciliation(
        billing_run,
        here.settings,
        ledger=here.ledger,
        reads=here.reads,
        actions=LedgerActions(here.engine, here.settings.limits, actor),
        runs=BillingRuns(here.engine, actor),
        gateway=here.gateway,
        holds=here.holds,
    )
    try:
        yield work
    finally:
        work.close()
