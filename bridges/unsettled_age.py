"""Whether charging gets on."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from models.errors import LedgerUnavailable

if TYPE_CHECKING:
    from bridges.dispatcher import Dispatcher
    from bridges.threads import LedgerCalls
    from models.ledger_reads import LedgerReads

logger = logging.getLogger(__name__)

ASK_EVERY_S: Final = 5.0
MANY_RECORDS: Final = 100
"""Fewer that are old are single cases, which must not hold up the rest; they ring an alarm."""
LATEST_MOVES: Final = 1000
"""Of all records: when not one of them settled anything, nothing gets on."""
PROBES: Final = 10
"""Events that are published all the same between two questions: what holds up the old records
may not concern the new ones, and only a charge can show it."""


class UnsettledAge:
    """Slows the publishing of new events down to a few while nothing gets charged.

    With Stripe away, say, each further event would only become another record for the sweep
    to try in vain, again and again; at the broker it costs nothing. Old records alone are no
    reason: they may wait for a person, for their billing run to be opened, or be recharged.
    """

    def __init__(
        self, reads: LedgerReads, calls: LedgerCalls, dispatcher: Dispatcher, limit_s: float
    ) -> None:
        """`limit_s`: records unsettled for longer are old; 0: nothing is ever held back."""
        self._reads = reads
        self._calls = calls
        self._dispatcher = dispatcher
        self._limit_s = limit_s

    async def run(self) -> None:
        """Ask again and again, until cancelled."""
        while self._limit_s:
            await self.run_once()
            await asyncio.sleep(ASK_EVERY_S)

    async def run_once(self) -> None:
        """Ask the ledger once. Without an answer everything stays as it was."""
        try:
            behind = await self._calls.call(self._is_behind)
        except LedgerUnavailable:
            return
        if behind != self._dispatcher.behind:
            event = "charging_behind" if behind else "charging_gets_on"
            logger.warning(event, extra={"limit_s": self._limit_s, "records": MANY_RECORDS})
        self._dispatcher.probes = PROBES if behind else None

    def _is_behind(self) -> bool:
        old = self._reads.count_unsettled(self._limit_s, MANY_RECORDS)
        return old >= MANY_RECORDS and not self._reads.settles(LATEST_MOVES)
