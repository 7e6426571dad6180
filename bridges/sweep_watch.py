"""Whether the sweep runs: everything else that would tell rings inside the sweep itself."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from models.errors import LedgerUnavailable

if TYPE_CHECKING:
    from bridges.dispatcher import Dispatcher
    from bridges.threads import LedgerCalls
    from models.ledger_reads import LedgerReads
    from models.limits import Limits

logger = logging.getLogger(__name__)

WATCH_EVERY_S: Final = 60.0
LATE_FACTOR: Final = 4
"""A record that is due this many rounds of the sweep ago, with none handed out since."""


class SweepWatch:
    """Rings once a minute while records are due and nobody hands them out."""

    def __init__(
        self, reads: LedgerReads, calls: LedgerCalls, dispatcher: Dispatcher, limits: Limits
    ) -> None:
        self.missing = False
        """What the last look has found."""
        self._reads = reads
        self._calls = calls
        self._dispatcher = dispatcher
        self._late_s = LATE_FACTOR * (limits.redispatch_after_s + limits.sweep_interval_s)

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            await self.run_once()

    async def run_once(self) -> None:
        """Look once. Without an answer of the ledger everything stays as it was."""
        try:
            late = await self._calls.call(self._reads.no_sweep, self._late_s)
        except LedgerUnavailable:
            return
        # A sweep hands nothing out either while the task queue is full.
        self.missing = late and not self._dispatcher.paused
        if self.missing:
            logger.error("alarm_no_sweep", extra={"late_s": self._late_s})
