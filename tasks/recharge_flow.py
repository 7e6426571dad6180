"""Approved recharges: a new attempt epoch of a known failure, committed first, published after.

Knows nothing of Celery. What is not published is found by the sweep.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from models.errors import ChargebridgeError, EventRefused, StateForbids
from models.events import check_payment_method
from models.states import KNOWN_FAILURES, State

if TYPE_CHECKING:
    from models.ledger_actions import LedgerActions
    from models.ledger_reads import LedgerReads
    from models.records import Record

HARD_DECLINES: Final = frozenset(
    {
        "do_not_try_again",
        "fraudulent",
        "highest_risk_level",
        "invalid_account",
        "lost_card",
        "merchant_blacklist",
        "pickup_card",
        "restricted_card",
        "revocation_of_all_authorizations",
        "revocation_of_authorization",
        "security_violation",
        "stolen_card",
        "stop_payment_order",
    }
)
"""Decline codes after which the same card must not be tried again: it is lost, or the bank or
the customer has said so for good. Trying all the same counts against the merchant."""
MAX_REASON_CHARACTERS: Final = 500
MAX_RECHARGES: Final = 1_000
"""Of one bulk command."""
PAGE: Final = 100

logger = logging.getLogger(__name__)

Publish = Callable[[str], bool]


class RechargeRefused(ChargebridgeError):  # noqa: N818 - says what happened
    """A recharge that is not allowed as it was asked for; nothing was changed."""


@dataclass(frozen=True, slots=True)
class Approval:
    """Who asks for a recharge, and how. `force`: a hard decline is tried again all the same."""

    reason: str
    payment_method: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        check_reason(self.reason)
        if self.payment_method is not None:
            try:
                check_payment_method(self.payment_method)
            except EventRefused as refused:
                raise RechargeRefused(refused.detail) from None


@dataclass(frozen=True, slots=True)
class Started:
    """`already`: the same request had started it before. `published`: workers know of it."""

    record: Record
    already: bool
    published: bool


@dataclass(frozen=True, slots=True)
class Line:
    """One record of a bulk recharge: `result` is started, would start, or why not."""

    record: Record
    result: str
    done: bool


class Recharges:
    """Starts recharges through one ledger."""

    def __init__(self, actions: LedgerActions, reads: LedgerReads, publish: Publish) -> None:
        self.actions = actions
        self.reads = reads
        self.publish = publish

    def start(
        self,
        customer_id: str,
        billing_period: str,
        approval: Approval,
        *,
        from_epoch: int | None = None,
        request_id: str | None = None,
    ) -> Started:
        """Start the next epoch of a record, once per request id and once per epoch.

        `from_epoch` None: from whatever epoch it is in now. Raises NotFound, StateForbids,
        RechargeRefused, LedgerUnavailable; nothing is changed then.
        """
        record = self.actions.find(customer_id, billing_period)
        return self._start(record, approval, from_epoch, request_id or str(uuid4()))

    def many(
        self, billing_period: str, state: State, approval: Approval, *, limit: int, dry_run: bool
    ) -> Iterator[Line]:
        """The same for all records of a period in one state, in key order, up to a limit."""
        if state not in KNOWN_FAILURES:
            raise RechargeRefused(f"a record that is {state} is not recharged")
        for record in self._page_through(billing_period, state, min(limit, MAX_RECHARGES)):
            refusal = _refusal(record, approval)
            if refusal is not None or dry_run:
                yield Line(record, refusal or "would start", done=refusal is None)
                continue
            try:
                started = self._start(record, approval, record.attempt_epoch, str(uuid4()))
            except StateForbids as forbidden:
                yield Line(record, str(forbidden), done=False)
            else:
                yield Line(started.record, "started", done=True)

    def _start(
        self, record: Record, approval: Approval, from_epoch: int | None, request_id: str
    ) -> Started:
        epoch = record.attempt_epoch if from_epoch is None else from_epoch
        if record.attempt_epoch == epoch:
            refusal = _refusal(record, approval)
            if refusal is not None:
                raise RechargeRefused(
                    f"the record of {record.customer_id} {record.billing_period}: {refusal}"
                )
        done = self.actions.recharge(
            record,
            from_epoch=epoch,
            reason=approval.reason,
            request_id=request_id,
            payment_method=approval.payment_method,
        )
        extra = {
            "charge_key": done.record.charge_key,
            "epoch": done.record.attempt_epoch,
            "already": done.already,
            "request_id": request_id,
        }
        logger.info("recharge_started", extra=extra)
        return Started(done.record, done.already, self.publish(done.record.charge_key))

    def _page_through(self, billing_period: str, state: State, limit: int) -> Iterator[Record]:
        after_key, left = "", limit
        while left > 0:
            page = self.reads.list(
                limit=min(PAGE, left),
                after_key=after_key,
                state=state,
                billing_period=billing_period,
            )
            yield from page
            left -= len(page)
            if len(page) < PAGE:
                return
            after_key = page[-1].charge_key


def check_reason(reason: str) -> None:
    """Every manual action says why. Raises RechargeRefused."""
    if not reason.strip():
        raise RechargeRefused("a reason is needed")
    if len(reason) > MAX_REASON_CHARACTERS or not reason.isprintable():
        raise RechargeRefused(f"a reason is one line of at most {MAX_REASON_CHARACTERS} characters")


def _refusal(record: Record, approval: Approval) -> str | None:
    hard = record.state is State.CARD_DECLINED and record.decline_code in HARD_DECLINES
    if not hard or approval.force:
        return None
    if approval.payment_method not in (None, record.payment_method):
        return None
    return f"needs another payment method or --force ({record.decline_code})"
