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
from models.outcomes import History, Outcome, classify
from models.records import Claim, NewRecord, Record, StoredRequest
from models.states import State
from tasks.alarms import Alarm, ring
from tasks.errors import StripeUnavailable
from tasks.look_up import LookUp
from tasks.preparation import payment_method_for
from tasks.recording import report, write_until
from tasks.requests import build_request
from tasks.send_guard import call_deadline_s, send_guard

if TYPE_CHECKING:
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
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.ledger = ledger
        self.gateway = gateway
        self.settings = settings
        self.limits = settings.limits
        self.look_up = look_up
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
        try:
            method = self._payment_method(order.event)
        except StripeUnavailable as error:
            self.ledger.reserve(new, error.code, self._backoff_s(1))
            return self._not_prepared(order.charge_key, error)
        request = self._build(order.event, order.charge_key, 0, method)
        fault_point("worker.before_claim")
        claim = self.ledger.claim_new(new, request, method)
        return self._send(claim, request, deadline_s)

    def _reserved(
        self, order: Order, record: Record, stored: StoredRequest | None, deadline_s: float
    ) -> str:
        """Send for the first time since it was certain that nothing had reached Stripe."""
        method = record.payment_method
        if stored is not None:
            # The bytes of the epoch's first claim, whatever code or settings say by now. The
            # key may be another: what it stands for was proved to be nothing.
            request = replace(stored, upstream_key_id=self.gateway.key_id)
        else:
            event = _event_of(record) or order.event
            if event is None:
                return "no_event"
            try:
                method = method or self._payment_method(event)
            except StripeUnavailable as error:
                self.ledger.defer(record, error.code, self._backoff_s(record.deferrals + 1))
                return self._not_prepared(record.charge_key, error)
            request = self._build(event, record.charge_key, record.attempt_epoch, method)
        fault_point("worker.before_claim")
        return self._send(self.ledger.claim(record, request, method), request, deadline_s)

    def _resend(self, record: Record, stored: StoredRequest | None, deadline_s: float) -> str:
        """Send the same key and bytes again."""
        if stored is None:
            ring(Alarm.REQUEST_LOST, charge_key=record.charge_key)
            return self.look_up.run(record, "request_lost", deadline_s)
        fault_point("worker.before_claim")
        return self._send(self.ledger.claim(record, stored, None), stored, deadline_s)

    # -- the call ------------------------------------------------------------------------

    def _send(self, claim: Claim | None, request: StoredRequest, deadline_s: float) -> str:
        if claim is None:
            # Somebody else was faster; whoever it was goes on with it.
            return "leave:lost_claim"
        fault_point("worker.after_claim")
        guard = send_guard(claim, self.limits)
        fault_point("worker.before_send")
        reply = self.gateway.create(request, call_deadline_s(claim, self.limits), guard)
        fault_point("worker.after_call")
        outcome = classify(reply, History(earlier_unknown=claim.earlier_unknown, vaulted=False))
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

    def _payment_method(self, event: BillingEvent) -> str | None:
        deadline_s = boot_clock_s() + self.limits.preparation_s
        return payment_method_for(event, self.gateway, deadline_s)

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

    def _not_prepared(self, charge_key: str, error: StripeUnavailable) -> str:
        ring(Alarm.NOT_EXECUTED, charge_key=charge_key, step="preparation", error_code=error.code)
        return f"reserved:{error.code}"


def _conflicts(record: Record, event: BillingEvent | None) -> bool:
    return (
        event is not None
        and record.fingerprint is not None
        and record.fingerprint != event.fingerprint
    )


def _event_of(record: Record) -> BillingEvent | None:
    return event_from_json(record.event) if record.event is not None else None
