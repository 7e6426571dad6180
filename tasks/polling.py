"""Asks Stripe about intents that were left open: bank debits, and customers who must act.

There are no webhooks to miss: what was `processing` or `requires_action` when it settled is
retrieved with growing pauses until it ends, or until a person has to decide.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from models.ledger import boot_clock_s
from models.lookups import Finding, SeenObject
from models.outcomes import Outcome, OutcomeKind
from models.states import TRANSITIONS, Move
from tasks.alarms import Alarm, ring
from tasks.errors import StripeUnavailable
from tasks.look_up import seen_object
from tasks.requests import CHARGES, PAYMENT_INTENTS

if TYPE_CHECKING:
    from models.ledger_actions import LedgerActions
    from models.records import Record
    from tasks.stripe_gateway import StripeGateway
    from tasks.vault_holds import VaultHolds

BATCH: Final = 20
MAX_POLLS: Final = 200
"""Of one sweep; what is left is due at the next one."""
POLLING_S: Final = 10.0
"""One sweep asks no longer than this, so that due charges never wait behind open intents."""
POLLING_SHARE: Final = 0.25
"""Of a task's soft time limit, where that is less: a sweep has more to do afterwards."""

logger = logging.getLogger(__name__)


class Polling:
    """Polls open intents with one ledger and one gateway. Two at once ask nothing twice."""

    def __init__(
        self, actions: LedgerActions, gateway: StripeGateway, holds: VaultHolds | None = None
    ) -> None:
        self.actions = actions
        self.gateway = gateway
        self.holds = holds
        self.limits = actions.limits

    def run(self) -> int:
        """Ask about what is due, within the limits of one sweep; the number asked about."""
        until_s = boot_clock_s() + min(POLLING_S, POLLING_SHARE * self.limits.soft_limit_s)
        asked = 0
        while asked < MAX_POLLS and boot_clock_s() < until_s:
            taken = self.run_once(until_s)
            asked += taken
            if taken < BATCH:
                break
        if asked:
            logger.info("polling_done", extra={"polled": asked})
        return asked

    def run_once(self, until_s: float | None = None) -> int:
        """One batch; how many were taken. Those that time has run out for are due again soon."""
        taken = self.actions.take_polls(BATCH)
        for record, now in taken:
            if until_s is not None and boot_clock_s() >= until_s:
                break
            self._ask(record, now, until_s)
        return len(taken)

    def _ask(self, record: Record, now: datetime, until_s: float | None) -> None:
        ids = {"charge_key": record.charge_key, "state": str(record.state)}
        try:
            found = self._judged(record, now, until_s)
            if self.holds is not None:
                self.holds.tell(record, found.outcome, found.epoch, seen_at=now)
        except StripeUnavailable as error:
            # It is held back for a while as it is: the next sweeps ask again.
            logger.warning("poll_not_answered", extra=ids | {"error_code": error.code})
            return
        outcome, why = found.outcome, found.why
        written = self.actions.record_poll(record, outcome, why)
        if written is None or written.state is record.state:
            return
        logger.info("poll_ended", extra=ids | {"outcome": str(outcome.kind), "why": why})
        if outcome.kind is OutcomeKind.UNRECOGNISED:
            ring(Alarm.REVIEW, charge_key=record.charge_key, why=why)

    def _judged(self, record: Record, now: datetime, until_s: float | None) -> Finding:
        seen = self._retrieve(record, until_s)
        if seen is None:
            return _review(record, "the open object is not at Stripe")
        if not _is_ours(record, seen):
            return _review(record, "another amount, currency or charge key")
        outcome = Outcome(
            # A refused authentication leaves a charge, unlike an intent, that nobody can pay.
            kind=OutcomeKind.CARD_DECLINED if seen.is_dead else seen.kind,
            payment_intent_id=seen.payment_intent_id,
            charge_id=seen.charge_id,
            error_code=seen.error_code,
            decline_code=seen.decline_code,
        )
        if (record.state, outcome.state) not in TRANSITIONS[Move.POLL]:
            return _review(record, f"found {seen.status}")
        if outcome.kind in (OutcomeKind.PROCESSING, OutcomeKind.REQUIRES_ACTION):
            since = record.settled_at or record.updated_at
            if now - since >= timedelta(seconds=self.limits.poll_for_s):
                return _review(record, f"open for too long: {seen.status}")
        # A recharge can have adopted an object of an earlier epoch: its hold is that epoch's.
        return Finding(outcome, f"found {seen.status}", epoch=seen.epoch)

    def _retrieve(self, record: Record, until_s: float | None) -> SeenObject | None:
        deadline_s = boot_clock_s() + self.limits.call_s
        if until_s is not None:
            deadline_s = min(deadline_s, until_s)
        if record.payment_intent_id is not None:
            item = self.gateway.retrieve(PAYMENT_INTENTS, record.payment_intent_id, deadline_s)
        elif record.charge_id is not None:
            item = self.gateway.retrieve(CHARGES, record.charge_id, deadline_s)
        else:
            return None
        return None if item is None else seen_object(item)


def _is_ours(record: Record, seen: SeenObject) -> bool:
    return (seen.charge_key, seen.amount_cents, seen.currency) == (
        record.charge_key,
        record.amount_cents,
        record.currency,
    )


def _review(record: Record, why: str) -> Finding:
    outcome = Outcome(
        OutcomeKind.UNRECOGNISED,
        payment_intent_id=record.payment_intent_id,
        charge_id=record.charge_id,
        error_code="poll_unclear",
    )
    return Finding(outcome, why)
