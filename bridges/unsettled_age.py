"""Whether charging gets on: many records that are unsettled for long mean that it does not."""

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


class UnsettledAge:
    """Stops the publishing of new events while the old ones do not get charged.

    With Stripe away, say, each further event would only become another record for the sweep
    to try in vain, again and again; at the broker it costs nothing. What waits for somebody
    to open its billing run says nothing about charging and is not counted.
    """

    def __init__(
        self, reads: LedgerReads, calls: LedgerCalls, dispatcher: Dispatcher, limit_s: float
    ) -> None:
        """`limit_s`: records unsettled for longer are old; 0: nothing is ever stopped."""
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
            old = await self._calls.call(self._reads.count_unsettled, self._limit_s, MANY_RECORDS)
        except LedgerUnavailable:
            return
        behind = old >= MANY_RECORDS
        if behind != self._dispatcher.behind:
            self._dispatcher.behind = behind
            event = "charging_behind" if behind else "charging_gets_on"
            logger.warning(event, extra={"limit_s": self._limit_s, "records": MANY_RECORDS})
