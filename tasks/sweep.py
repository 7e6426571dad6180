"""The sweep: publishes due unsettled records, by key only, so that workers take them up again.

After them it asks about open intents, for a limited time, and tells the vault about holds that
settled records have left behind.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kombu.exceptions import OperationalError

from models.billing_runs import BillingRuns
from models.clocks import clock_off_s, written_in_the_future
from models.errors import LedgerUnavailable
from models.keys import KEY_LENGTH
from models.ledger_actions import LedgerActions
from models.limits import MAX_CLOCK_OFF_S
from tasks.alarms import Alarm, ring_seldom
from tasks.celery_app import app
from tasks.errors import SweepFailed
from tasks.polling import Polling
from tasks.publishing import charges_waiting, publish_charge
from tasks.runtime import runtime
from tasks.unrevokable import UnrevokableTask

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from models.ledger import Ledger
    from models.ledger_reads import LedgerReads

BATCH: Final = 100
MAX_PUBLISHED: Final = 2_000
"""Of one run; the next one goes on where it matters, with what is due then."""
STUCK_FACTOR: Final = 4
"""A record that is unsettled for this many times the proof of absence is worth a person's look."""
STUCK_PAUSE_S: Final = 60.0
"""Between two alarms of one process: each sweep would ring again."""

logger = logging.getLogger(__name__)

Publish = Callable[[str], None]


class Sweep:
    """Walks the due records in key order. Running two at once publishes nothing twice."""

    def __init__(
        self,
        ledger: Ledger,
        reads: LedgerReads,
        publish: Publish,
        *,
        waiting: Callable[[], int] | None = None,
        max_depth: int = 0,
    ) -> None:
        """`waiting`: charges on the queue now; beyond `max_depth` (0: any number) and what one
        run may add to it, nothing is published."""
        self.waiting = waiting
        self.max_depth = max_depth
        self.ledger = ledger
        self.reads = reads
        self.publish = publish

    def run(self, start_key: str = "") -> int:
        """Publish what is due, up to the run's limit, from a key on and around; the number.

        A run that always began with the first key would never come to the last ones while more
        records are due than it may publish: those of a run that is not open, say.
        """
        published = 0
        if self._is_full():
            self._report(published)
            return published
        after_key, is_last_round = start_key, not start_key
        while published < MAX_PUBLISHED:
            keys = self.run_once(after_key)
            published += len(keys)
            if len(keys) == BATCH:
                after_key = keys[-1]
            elif is_last_round:
                break
            else:
                # What was published just now is not due again, so this ends where it began.
                after_key, is_last_round = "", True
        self._report(published)
        return published

    def _is_full(self) -> bool:
        """Whether the workers are that far behind: publishing it again would only bury them.

        Bridges stop earlier, so that they cannot keep the sweep from its turn.
        """
        if self.waiting is None or not self.max_depth:
            return False
        depth = self.waiting()
        if depth < self.max_depth + MAX_PUBLISHED:
            return False
        logger.warning("sweep_waits", extra={"depth": depth, "limit": self.max_depth})
        return True

    def run_once(self, after_key: str = "") -> list[str]:
        """Publish one batch of due records after a key; their keys.

        A record is marked as dispatched before it is published: what a failing broker does not
        take is due again after `redispatch_after_s`. Raises what the publisher raises.
        """
        keys = self.ledger.dispatch_due(after_key, BATCH)
        for key in keys:
            self.publish(key)
        return keys

    def _report(self, published: int) -> None:
        oldest_s = self.reads.oldest_unsettled_s()
        if published or oldest_s is not None:
            extra = {"published": published, "oldest_unsettled_s": round(oldest_s or 0.0, 1)}
            logger.info("sweep_done", extra=extra)
        if oldest_s is not None and oldest_s > STUCK_FACTOR * self.ledger.limits.proof_of_absence_s:
            ring_seldom(Alarm.STUCK, STUCK_PAUSE_S, oldest_unsettled_s=round(oldest_s, 1))


def watch_clock(engine: Engine, host_clock: Callable[[], float] = time.time) -> None:
    """Ring while the database's clock is off, and while records stand from when it was."""
    off_s = clock_off_s(engine, host_clock)
    if abs(off_s) > MAX_CLOCK_OFF_S or written_in_the_future(engine):
        ring_seldom(Alarm.CLOCK, STUCK_PAUSE_S, database_ahead_s=round(off_s, 1))


def _any_key() -> str:
    return secrets.token_hex(KEY_LENGTH // 2)


@app.task(name="tasks.sweep", base=UnrevokableTask)
def sweep() -> str:
    """Re-drive what is due. Raises SweepFailed, with a text that is safe to show."""
    here = runtime()
    try:
        work = Sweep(
            here.ledger,
            here.reads,
            publish_charge,
            waiting=charges_waiting,
            max_depth=here.settings.bridge_max_queue_depth,
        )
        BillingRuns(here.engine, here.ledger.actor).reopen_abandoned()
        published = work.run(_any_key())
        actions = LedgerActions(here.engine, here.settings.limits, here.ledger.actor)
        polled = Polling(actions, here.gateway, here.holds).run()
        here.holds.resolve_left(here.engine)
        watch_clock(here.engine)
    except LedgerUnavailable:
        raise SweepFailed("ledger_unavailable") from None
    except (OperationalError, OSError) as error:
        raise SweepFailed(f"broker_unavailable ({type(error).__name__})") from None
    return f"published {published}, polled {polled}"
