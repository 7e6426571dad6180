"""The way of one charge: prepare, claim, call, record. Knows nothing of Celery.

Two commits with the call between them, and no transaction open during the call. The first
commit already says `sent`; from then on nobody may believe that Stripe was not called.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, assert_never

from models.decisions import Action, backoff_s, decide
from models.events import BillingEvent, event_from_json
from models.faults import fault_point
from models.ledger import Ledger, Retry, boot_clock_s
from models.money import MAX_TOTAL_CENTS
from models.outcomes import History, Outcome, classify
from models.records import Claim, NewRecord, Record, StoredRequest
from models.states import State
from tasks.alarms import Alarm, ring
from tasks.cancel_earlier import Clear, EarlierObjects
from tasks.errors import StripeUnavailable
from tasks.look_up import LookUp
from tasks.preparation import payment_method_for
from tasks.recording import report, write_until
from tasks.requests import build_request
from tasks.send_guard import call_deadline_s, send_guard

if TYPE_CHECKING:
    from models.lookups import Finding
    from models.settings import Settings
    from tasks.stripe_gateway import StripeGateway

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Order:
    """What a charge task was given. No event: driven from the ledger alone."""

    charge_key: str
    event: BillingEvent | None
    source: str


class ChargeFlow:
    """Drives billing records with one ledger and one gateway."""

    def __init__(
        self,
        ledger: Ledger,
        gateway: StripeGateway,
        settings: Settings,
        look_up: LookUp,
        earlier: EarlierObjects,
        *,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.ledger = ledger
        self.gateway = gateway
        self.settings = settings
        self.limits = settings.limits
        self.look_up = look_up
        self.earlier = earlier
        self.draw = draw

    def run(self, order: Order, deadline_s: float) -> str:
        """Take the next step for a charge key; a word for what was done.

        `deadline_s` (boot-time clock) bounds the repeats of writing the outcome. Raises
        LedgerUnavailable before anything was sent, OutcomeNotRecorded after.
        """
        snapshot = self.ledger.read(order.charge_key)
        record = snapshot.record
        if record is None:
            return self._first(order, deadline_s) if order.event is not None else "no_record"
        if _conflicts(record, order.event):
            # The bridge keeps the conflicting delivery; the first event goes its own way.
            return "payload_conflict"
        stored = self.ledger.stored_request(record.charge_key, record.attempt_epoch)
        changed = stored is not None and stored.upstream_key_id != self.gateway.key_id
        decision = decide(record.view, snapshot.now, self.limits, upstream_changed=changed)
        match decision.action:
            case Action.SKIP | Action.LEAVE:
                return f"{decision.action}:{decision.why}"
            case Action.CHARGE:
                return self._reserved(order, record, stored, deadline_s)
            case Action.RESEND:
                return self._resend(record, stored, deadline_s)
            case Action.LOOK_UP:
                return self.look_up.run(record, decision.why, deadline_s)
            case Action.GIVE_UP:
                return self._give_up(record, decision.why)
            case _:
                assert_never(decision.action)

    # -- the three ways to a claim -------------------------------------------------------

    def _first(self, order: Order, deadline_s: float) -> str:
        assert order.event is not None
        new = NewRecord(event=order.event, charge_key=order.charge_key, source=order.source)
        deadline = self._preparation_deadline_s()
        try:
            self.gateway.ready(order.event.billing_run, order.event.currency)
            method = payment_method_for(order.event, self.gateway, deadline)
            self.gateway.admit(self.settings.stripe_charge_api, deadline)
        except StripeUnavailable as error:
            self.ledger.reserve(new, error.code, self._backoff_s(1))
            return self._not_prepared(order.charge_key, State.RESERVED, error)
        request = self._build(order.event, order.charge_key, 0, method)
        fault_point("worker.before_claim")
        claim = self.ledger.claim_new(new, request, method)
        return self._send(claim, request, deadline_s)

    def _reserved(
        self, order: Order, record: Record, stored: StoredRequest | None, deadline_s: float
    ) -> str:
        """Send for the first time since it was certain that nothing had reached Stripe."""
        event = _event_of(record) or order.event
        if stored is None and event is None:
            return "no_event"
        method = record.payment_method
        deadline = self._preparation_deadline_s()
        try:
            self.gateway.ready(record.billing_run, record.currency)
            if stored is not None:
                # The bytes of the epoch's first claim, whatever code or settings say by now. The
                # key may be another: what it stands for was proved to be nothing.
                request = replace(stored, upstream_key_id=self.gateway.key_id)
            else:
                assert event is not None
                method = method or payment_method_for(event, self.gateway, deadline)
                request = self._build(event, record.charge_key, record.attempt_epoch, method)
            found = self._before_send(record, request, deadline, deadline_s)
        except StripeUnavailable as error:
            self.ledger.defer(record, error.code, self._backoff_s(record.deferrals + 1))
            return self._not_prepared(record.charge_key, record.state, error)
        if found is not None:
            return found
        fault_point("worker.before_claim")
        return self._send(self.ledger.claim(record, request, method), request, deadline_s)

    def _resend(self, record: Record, stored: StoredRequest | None, deadline_s: float) -> str:
        """Send the same key and bytes again."""
        if stored is None:
            ring(Alarm.REQUEST_LOST, charge_key=record.charge_key)
            return self.look_up.run(record, "request_lost", deadline_s)
        deadline = self._preparation_deadline_s()
        try:
            self.gateway.ready(record.billing_run, record.currency)
            found = self._before_send(record, stored, deadline, deadline_s)
        except StripeUnavailable as error:
            self.ledger.postpone(record, error.code, self._backoff_s(record.unknowns + 1))
            return self._not_prepared(record.charge_key, record.state, error)
        if found is not None:
            return found
        fault_point("worker.before_claim")
        return self._send(self.ledger.claim(record, stored, None), stored, deadline_s)

    def _before_send(
        self, record: Record, request: StoredRequest, deadline: float, record_until_s: float
    ) -> str | None:
        """What every send waits for; a word for what was done instead, None to go on.

        Of a recharge: nothing of its earlier epochs, nor of its own, can still take money.
        Raises StripeUnavailable when that could not be established in time.
        """
        if record.attempt_epoch > 0:
            cleared = self.earlier.clear(record, deadline)
            match cleared.clear:
                case Clear.MOVED:
                    return "leave:moved"
                case Clear.MONEY:
                    assert cleared.finding is not None
                    return self._adopt(record, cleared.finding, record_until_s)
                case Clear.NOTHING_OPEN:
                    pass
                case _:
                    assert_never(cleared.clear)
        self.gateway.admit(request.endpoint, deadline)
        return None

    def _adopt(self, record: Record, finding: Finding, record_until_s: float) -> str:
        """Take over what an earlier epoch came to, instead of sending."""
        recorded = write_until(
            record_until_s,
            record.charge_key,
            lambda: self.ledger.adopt(record, finding.outcome, finding.why),
        )
        ids = {"charge_key": record.charge_key, "epoch": record.attempt_epoch, "why": finding.why}
        logger.info("charge_adopted", extra=ids)
        if finding.double_charge:
            ring(Alarm.DOUBLE_CHARGE, charge_key=record.charge_key)
        return report(record, finding.outcome, recorded)

    # -- the call ------------------------------------------------------------------------

    def _send(self, claim: Claim | None, request: StoredRequest, deadline_s: float) -> str:
        if claim is None:
            # Somebody else was faster; whoever it was goes on with it.
            return "leave:lost_claim"
        fault_point("worker.after_claim")
        guard = send_guard(claim, self.limits)
        fault_point("worker.before_send")
        reply = self.gateway.create(
            request,
            call_deadline_s(claim, self.limits),
            guard,
            lease_expires_at=claim.record.lease_expires_at,
        )
        fault_point("worker.after_call")
        marked = self.gateway.is_marked(reply)
        outcome = classify(reply, History(earlier_unknown=claim.earlier_unknown, vaulted=marked))
        retry = self._retry(claim.record, outcome)
        recorded = write_until(
            deadline_s,
            claim.record.charge_key,
            lambda: self.ledger.record_outcome(claim, outcome, retry),
        )
        fault_point("worker.after_outcome")
        return report(claim.record, outcome, recorded)

    def _retry(self, record: Record, outcome: Outcome) -> Retry:
        failures = record.deferrals if outcome.state is State.RESERVED else record.unknowns
        return Retry(after_s=self._backoff_s(failures + 1))

    # -- small steps ---------------------------------------------------------------------

    def _preparation_deadline_s(self) -> float:
        return boot_clock_s() + self.limits.preparation_s

    def _build(
        self, event: BillingEvent, charge_key: str, epoch: int, method: str | None
    ) -> StoredRequest:
        return build_request(
            event,
            charge_key,
            epoch=epoch,
            payment_method=method,
            key_id=self.gateway.key_id,
            namespace=self.settings.charge_namespace,
            endpoint=self.settings.stripe_charge_api,
        )

    def _backoff_s(self, failures: int) -> float:
        return backoff_s(failures, self.limits, self.draw())

    def _give_up(self, record: Record, why: str) -> str:
        if not self.ledger.give_up(record, why):
            return "leave:moved"
        ring(Alarm.GAVE_UP, charge_key=record.charge_key, epoch=record.attempt_epoch)
        return str(State.REVIEW)

    def _not_prepared(self, charge_key: str, state: State, error: StripeUnavailable) -> str:
        if error.code == "rate_limited":
            logger.info("charge_rate_limited", extra={"charge_key": charge_key})
        else:
            ring(
                Alarm.NOT_EXECUTED, charge_key=charge_key, step="preparation", error_code=error.code
            )
        return f"{state}:{error.code}"


def _conflicts(record: Record, event: BillingEvent | None) -> bool:
    return (
        event is not None
        and record.fingerprint is not None
        and record.fingerprint != event.fingerprint
    )


def _event_of(record: Record) -> BillingEvent | None:
    if record.event is None:
        return None
    # It was let in when it came, whatever the limit of amounts is by now.
    return event_from_json(record.event, max_amount_cents=MAX_TOTAL_CENTS)
