"""Commits refused deliveries as dead letters, off the event loop."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from bridges.backoff import Backoff
from models.errors import LedgerUnavailable
from models.faults import fault_point

if TYPE_CHECKING:
    from bridges.threads import LedgerCalls
    from models.dead_letters import DeadLetters, NewDeadLetter
    from models.limits import Limits

logger = logging.getLogger(__name__)

AT_ONCE: Final = 20
"""Letters that one visit to the ledger commits at most: on a slow disk a flood of them would
never be through within the limit of one call, and each try would begin with the first."""


class DeadLetterWriter:
    """What was not committed is held, and tried again with back-off."""

    def __init__(self, dead_letters: DeadLetters, calls: LedgerCalls, limits: Limits) -> None:
        self._dead_letters = dead_letters
        self._calls = calls
        self._backoff = Backoff(limits)

    async def write(self, letters: Sequence[NewDeadLetter]) -> int:
        """Commit the first ones in their order; returns how many are in the ledger for sure."""
        letters = letters[:AT_ONCE]
        if not letters or not self._backoff.ready:
            return 0
        try:
            written = await self._calls.call(self._write, letters)
        except LedgerUnavailable:
            # It may have been written: the same delivery again only counts up.
            written = 0
        if written == len(letters):
            self._backoff.worked()
        else:
            pause_s = self._backoff.failed()
            logger.warning("dead_letter_not_written", extra={"retry_s": round(pause_s, 1)})
        return written

    def hurry(self) -> None:
        """The bridge is stopping: wait for an answer only shortly."""
        self._calls.hurry()

    def _write(self, letters: Sequence[NewDeadLetter]) -> int:
        for written, letter in enumerate(letters):
            fault_point("bridge.before_dead_letter")
            try:
                letter_id = self._dead_letters.bury(letter)
            except LedgerUnavailable:
                return written
            extra = {
                "dead_letter": letter_id,
                "reason": str(letter.reason),
                "source": letter.source,
                "delivery_id": letter.delivery_id,
            }
            logger.warning("dead_letter", extra=extra)
        return len(letters)
