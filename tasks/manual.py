"""What an operator decides about one record: that it must not be charged, or what became of it.

Each decision is checked at Stripe first. Knows nothing of Celery.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from models.decisions import absence_is_proof, absence_proof_at
from models.errors import ChargebridgeError, EventRefused, NotFound, StateForbids
from models.events import check_id
from models.keys import charge_key
from models.ledger import Applied, Ledger, boot_clock_s
from models.lookups import Finding, SeenObject
from models.outcomes import Outcome, OutcomeKind
from models.states import TRANSITIONS, Move, State, check_move
from tasks.alarms import Alarm, ring
from tasks.cancel_earlier import Clear, EarlierObjects
from tasks.errors import StripeUnavailable
from tasks.look_up import seen_object
from tasks.recharge_flow import check_reason
from tasks.requests import CHARGES, PAYMENT_INTENTS

if TYPE_CHECKING:
    from models.ledger_actions import LedgerActions
    from models.ledger_reads import LedgerReads
    from models.records import Record
    from tasks.stripe_gateway import StripeGateway
    from tasks.vault_holds import VaultHolds

ENDPOINT_OF: Final = {"pi": PAYMENT_INTENTS, "ch": CHARGES, "py": CHARGES}


class Manual:
    """Voids and resolves through one ledger and one gateway."""

    def __init__(
        self,
        actions: LedgerActions,
        ledger: Ledger,
        reads: LedgerReads,
        gateway: StripeGateway,
        namespace: str,
        *,
        holds: VaultHolds | None = None,
        before_asking: Callable[[], None] = lambda: None,
    ) -> None:
        """`before_asking` raises when what Stripe shows must not be believed here."""
        self.actions = actions
        self.ledger = ledger
        self.reads = reads
        self.gateway = gateway
        self.namespace = namespace
        self.limits = actions.limits
        self.holds = holds
        self.before_asking = before_asking
        self.earlier = EarlierObjects(ledger, reads, gateway, holds)

    # -- void ----------------------------------------------------------------------------

    def void(self, customer_id: str, billing_period: str, reason: str) -> Record:
        """Decide that an identity must not be charged; what is open at Stripe is canceled.

        Without a record a tombstone is set, which stands for every event of the identity. Raises
        StateForbids when money was taken or may still be, and ChargebridgeError when Stripe did
        not answer.
        """
        check_reason(reason)
        try:
            record = self.actions.find(customer_id, billing_period)
        except NotFound:
            return self._tombstone(customer_id, billing_period, reason)
        check_move(Move.VOID, record.state, State.VOIDED)
        if not self._never_sent(record):
            self._nothing_open(record)
        return self.actions.void(record, reason=reason, request_id=str(uuid4())).record

    def _never_sent(self, record: Record) -> bool:
        """Whether it is certain that Stripe never heard of it.

        That there are no attempts is not enough: a record that was recovered has none.
        """
        fresh = record.state is State.RESERVED and record.attempt_epoch == 0
        seen = record.payment_intent_id or record.charge_id
        return fresh and not seen and not self.reads.attempts(record.charge_key)

    def _tombstone(self, customer_id: str, billing_period: str, reason: str) -> Record:
        try:
            check_id("customer_id", customer_id)
            check_id("billing_period", billing_period)
        except EventRefused as refused:
            raise ChargebridgeError(refused.detail) from None
        key = charge_key(customer_id, billing_period, self.namespace)
        made = self.actions.tombstone(
            customer_id, billing_period, key, reason=reason, request_id=str(uuid4())
        )
        if made is None:
            raise StateForbids("an event of it came in just now; look at its record first")
        return made

    def _nothing_open(self, record: Record) -> None:
        cleared = self._clear(record)
        if cleared is not None:
            raise StateForbids(self._keep_truth(record, cleared))

    def _keep_truth(self, record: Record, finding: Finding) -> str:
        """Write money that a check came upon; the line that says so."""
        outcome = finding.outcome
        if finding.double_charge:
            ring(Alarm.DOUBLE_CHARGE, charge_key=record.charge_key)
        if (record.state, outcome.state) in TRANSITIONS[Move.ADOPT]:
            recorded = self.ledger.adopt(record, outcome, finding.why)
        else:
            recorded = self.ledger.late_truth(record.charge_key, outcome)
        if recorded.applied is Applied.LATE_REVIEW:
            ring(Alarm.LATE_SUCCESS, charge_key=record.charge_key)
        state = recorded.record.state if recorded.record is not None else record.state
        found = outcome.payment_intent_id or outcome.charge_id
        return f"Stripe shows {found} ({finding.why}); the record is {state} now"

    # -- resolve -------------------------------------------------------------------------

    def resolve_charged(
        self, customer_id: str, billing_period: str, object_id: str, reason: str
    ) -> Record:
        """Close a `review` as charged by this intent or charge, which is checked at Stripe."""
        check_reason(reason)
        record = self.actions.find(customer_id, billing_period)
        check_move(Move.RESOLVE, record.state, State.CHARGED)
        seen = self._checked(record, object_id)
        taken = Outcome(
            seen.kind, payment_intent_id=seen.payment_intent_id, charge_id=seen.charge_id
        )
        self._tell(record, taken, seen.epoch)
        return self.actions.resolve(
            record,
            State.CHARGED,
            reason=reason,
            request_id=str(uuid4()),
            payment_intent_id=seen.payment_intent_id,
            charge_id=seen.charge_id,
        ).record

    def resolve_not_charged(self, customer_id: str, billing_period: str, reason: str) -> Record:
        """Close a `review` as `rejected`, when Stripe shows nothing that was or can be paid.

        What is open is canceled. Refused until no request of the record can still be running.
        """
        check_reason(reason)
        record = self.actions.find(customer_id, billing_period)
        check_move(Move.RESOLVE, record.state, State.REJECTED)
        now = self.ledger.read(record.charge_key).now
        if record.last_sent_at is not None and not absence_is_proof(record.view, now, self.limits):
            until = absence_proof_at(record.view, self.limits)
            raise StateForbids(
                f"a request may still be running until {until:%Y-%m-%d %H:%M:%S}Z; try again then"
            )
        finding = self._clear(record)
        if finding is not None and not _is_another_amount(finding):
            found = finding.outcome.payment_intent_id or finding.outcome.charge_id
            raise StateForbids(f"Stripe shows {found} ({finding.why}): see --charged")
        self._tell(record, Outcome(OutcomeKind.REJECTED))
        return self.actions.resolve(
            record, State.REJECTED, reason=reason, request_id=str(uuid4())
        ).record

    def _checked(self, record: Record, object_id: str) -> SeenObject:
        endpoint = ENDPOINT_OF.get(object_id.partition("_")[0])
        if endpoint is None or not object_id.replace("_", "").isalnum():
            raise StateForbids("the object must be an intent (pi_…) or a charge (ch_…, py_…)")
        item = self._retrieve(endpoint, object_id)
        seen = seen_object(item)
        expected = {
            "customer": (item.get("customer"), record.stripe_customer_id),
            "amount": (seen.amount_cents, record.amount_cents),
            "currency": (seen.currency, record.currency),
            "charge key in its metadata": (seen.charge_key, record.charge_key),
        }
        for what, (found, wanted) in expected.items():
            if found != wanted:
                raise StateForbids(f"{object_id} does not belong to this record: another {what}")
        if seen.kind is not OutcomeKind.CHARGED:
            raise StateForbids(f"{object_id} took no money: it is {seen.status}")
        return seen

    # -- Stripe --------------------------------------------------------------------------

    def _tell(self, record: Record, outcome: Outcome, epoch: int | None = None) -> None:
        """Tell the vault first: the ledger is written only when it has taken it."""
        if self.holds is None:
            return
        try:
            self.holds.tell(record, outcome, epoch)
        except StripeUnavailable as error:
            raise ChargebridgeError(
                f"the vault did not take it ({error.code}); nothing was changed"
            ) from None

    def _clear(self, record: Record) -> Finding | None:
        """What earlier sends took; None when nothing did and nothing is open any more."""
        self.before_asking()
        try:
            cleared = self.earlier.clear(record, boot_clock_s() + self.limits.call_s)
        except StripeUnavailable as error:
            raise ChargebridgeError(
                f"Stripe could not be asked, or did not cancel ({error.code}); nothing was changed"
            ) from None
        if cleared.clear is Clear.MOVED:
            raise StateForbids("the record has moved meanwhile; look at it again")
        return cleared.finding

    def _retrieve(self, endpoint: str, object_id: str) -> Mapping[str, Any]:
        self.before_asking()
        try:
            item = self.gateway.retrieve(endpoint, object_id, boot_clock_s() + self.limits.call_s)
        except StripeUnavailable as error:
            raise ChargebridgeError(f"Stripe could not be asked ({error.code})") from None
        if item is None:
            raise NotFound(f"{object_id} is not at Stripe")
        return item


def _is_another_amount(finding: Finding) -> bool:
    """Money under this key that is not this record's: the person who resolves has seen it."""
    return finding.outcome.kind is OutcomeKind.UNRECOGNISED and not finding.double_charge
