"""Asks Stripe what became of a charge, where sending again would prove nothing.

Reads lists, never the search, which lags; all pages of every endpoint that was used.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from models.decisions import absence_is_proof, backoff_s
from models.ledger import Ledger, Retry
from models.ledger_reads import LedgerReads
from models.lookups import Evidence, Finding, SeenObject, Wanted, judge
from models.outcomes import VAULT_LOOK_UPS, Outcome, OutcomeKind
from models.records import Claim, Record
from models.replies import status_of, text_of
from tasks.alarms import Alarm, ring
from tasks.errors import CustomerUnknown, StripeUnavailable
from tasks.recording import report, write_until
from tasks.requests import CHARGES, ENDPOINTS, PAYMENT_INTENTS
from tasks.send_guard import call_deadline_s

if TYPE_CHECKING:
    from models.limits import Limits
    from tasks.stripe_gateway import StripeGateway
    from tasks.vault_holds import VaultHolds

CLOCK_MARGIN_S: Final = 24 * 3600
"""Lists begin this long before the record: clocks differ, and earlier epochs count."""

logger = logging.getLogger(__name__)


class LookUp:
    """Looks up `sent` records with one ledger and one gateway."""

    def __init__(
        self,
        ledger: Ledger,
        reads: LedgerReads,
        gateway: StripeGateway,
        limits: Limits,
        *,
        draw: Callable[[], float] = random.random,
        holds: VaultHolds | None = None,
    ) -> None:
        self.ledger = ledger
        self.reads = reads
        self.gateway = gateway
        self.limits = limits
        self.draw = draw
        self.holds = holds

    def run(self, record: Record, why: str, deadline_s: float) -> str:
        """Look one record up under a lease and write what was found; a word for it."""
        claim = self.ledger.lease(record)
        if claim is None:
            return "leave:lost_claim"
        logger.info("charge_looked_up", extra={"charge_key": record.charge_key, "why": why})
        finding = self._told(claim, self._find(claim))
        retry = Retry(
            after_s=backoff_s(claim.record.unknowns + 1, self.limits, self.draw()),
            until_proof=finding.outcome.error_code == "look_up_waits",
        )
        recorded = write_until(
            deadline_s,
            record.charge_key,
            lambda: self.ledger.record_finding(claim, finding.outcome, retry, finding.why),
        )
        if finding.double_charge:
            ring(Alarm.DOUBLE_CHARGE, charge_key=record.charge_key)
        return report(claim.record, finding.outcome, recorded)

    def _find(self, claim: Claim) -> Finding:
        record = claim.record
        call_s = call_deadline_s(claim, self.limits)
        attempts = self.reads.attempts(record.charge_key)
        assert record.stripe_customer_id is not None, "a record that was sent has a customer"
        try:
            exists = self.gateway.customer(record.stripe_customer_id, call_s).exists
            listed = list_charge(self.gateway, record, attempts, call_s)
        except CustomerUnknown:
            # Stripe lists nothing of a customer it does not know.
            exists, listed = False, []
        except StripeUnavailable as error:
            return _waits(error, "Stripe's lists were not read")
        evidence = Evidence(
            # The lease's own moment: the lists are younger than it.
            proof_time=absence_is_proof(record.view, record.updated_at, self.limits),
            customer_exists=exists,
            store_spoilt=any(_spoilt(row, record.attempt_epoch) for row in attempts),
        )
        return judge(wanted_of(record), listed, evidence)

    def _told(self, claim: Claim, finding: Finding) -> Finding:
        """The finding, once the vault knows of it; else one that keeps the record as it is."""
        if self.holds is None:
            return finding
        try:
            self.holds.tell(
                claim.record, finding.outcome, finding.epoch, seen_at=claim.record.updated_at
            )
        except StripeUnavailable as error:
            return _waits(error, "the vault does not know of it yet")
        return finding


def _waits(error: StripeUnavailable, why: str) -> Finding:
    return Finding(Outcome(OutcomeKind.UNKNOWN, error_code=f"look_up_{error.code}"), why)


def list_charge(
    gateway: StripeGateway,
    record: Record,
    attempts: Sequence[Mapping[str, Any]],
    deadline_s: float,
) -> list[SeenObject]:
    """Everything at Stripe that carries a record's charge key, newest first, from full lists.

    Of every endpoint that a call of this record used. Raises StripeUnavailable.
    """
    assert record.stripe_customer_id is not None, "a record that was sent has a customer"
    # A recovery has put the first send before all that is in doubt, the making of the row too.
    begun = min(record.created_at, record.first_sent_at or record.created_at)
    since = int(begun.timestamp()) - CLOCK_MARGIN_S
    seen: list[SeenObject] = []
    # Intents first: the charges that belong to them are the same money.
    for endpoint in sorted(_used(record, attempts), reverse=True):
        for item in gateway.list_objects(endpoint, record.stripe_customer_id, since, deadline_s):
            found = seen_object(item)
            if found.charge_key == record.charge_key and not _same_intent(found, seen):
                seen.append(found)
    known = _known_object(gateway, record, seen, deadline_s)
    return [*seen, known] if known is not None else seen


def _known_object(
    gateway: StripeGateway, record: Record, seen: Sequence[SeenObject], deadline_s: float
) -> SeenObject | None:
    """The object that the record names, if it is older than the lists: a recovered one can be."""
    intent, charge = record.payment_intent_id, record.charge_id
    listed = {name for item in seen for name in (item.payment_intent_id, item.charge_id)}
    if (intent or charge) is None or listed & {intent, charge} - {None}:
        return None
    if intent is not None:
        item = gateway.retrieve(PAYMENT_INTENTS, intent, deadline_s)
    else:
        item = gateway.retrieve(CHARGES, str(charge), deadline_s)
    found = None if item is None else seen_object(item)
    return found if found is not None and found.charge_key == record.charge_key else None


def _used(record: Record, attempts: Sequence[Mapping[str, Any]]) -> set[str]:
    known = {row["endpoint"] for row in attempts}
    begun = min((row["started_at"] for row in attempts), default=None)
    sent = record.first_sent_at
    if begun is None or (sent is not None and sent < begun):
        # The calls are not all in the ledger (it was restored from a copy): any endpoint.
        return set(ENDPOINTS)
    return known


def seen_object(item: Mapping[str, Any]) -> SeenObject:
    """A listed intent or charge as plain values."""
    metadata = item.get("metadata") or {}
    error = item.get("last_payment_error") or {}
    is_charge = item.get("object") == "charge"
    epoch = str(metadata.get("attempt_epoch", ""))
    return SeenObject(
        charge_key=metadata.get("charge_key"),
        epoch=int(epoch) if epoch.isdecimal() else None,
        status=status_of(item),
        amount_cents=item.get("amount"),
        currency=item.get("currency"),
        payment_intent_id=text_of(item.get("payment_intent" if is_charge else "id")),
        charge_id=text_of(item.get("id" if is_charge else "latest_charge")),
        error_code=item.get("failure_code") if is_charge else error.get("code"),
        decline_code=error.get("decline_code"),
    )


def _same_intent(found: SeenObject, seen: list[SeenObject]) -> bool:
    """Whether this charge belongs to an intent that was listed: it is the same money."""
    intent = found.payment_intent_id
    return intent is not None and any(item.payment_intent_id == intent for item in seen)


def wanted_of(record: Record) -> Wanted:
    """What the lists are searched for."""
    assert record.amount_cents is not None, "a record that was sent has its money fields"
    assert record.currency is not None, "a record that was sent has its money fields"
    return Wanted(
        charge_key=record.charge_key,
        epoch=record.attempt_epoch,
        amount_cents=record.amount_cents,
        currency=record.currency,
    )


def _spoilt(attempt: Mapping[str, Any], epoch: int) -> bool:
    """Whether this call showed that the idempotency store holds something of no use."""
    return (
        attempt["attempt_epoch"] == epoch
        and attempt["outcome"] == OutcomeKind.UNKNOWN_LOOK_UP
        and attempt["error_code"] not in VAULT_LOOK_UPS
    )
