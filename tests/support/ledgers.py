"""Values for tests that stand at the ledger itself."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from models.errors import LedgerUnavailable
from models.events import BillingEvent, event_from_json
from models.keys import charge_key
from models.ledger import Ledger
from models.outcomes import Outcome, OutcomeKind
from models.records import Claim, NewRecord, Record, StoredRequest

API_VERSION = "2026-10-28"


def event(
    customer_id: str = "cust_1", billing_period: str = "2026-Q3", **fields: object
) -> BillingEvent:
    """A billing event; any field can be given."""
    return event_from_json(
        {
            "customer_id": customer_id,
            "billing_period": billing_period,
            "amount_cents": 2500,
            "stripe_customer_id": "cus_T1",
            **fields,
        }
    )


def new_record(billing_event: BillingEvent | None = None, source: str = "nsq") -> NewRecord:
    billing_event = billing_event or event()
    key = charge_key(billing_event.customer_id, billing_event.billing_period)
    return NewRecord(event=billing_event, charge_key=key, source=source)


def request(new: NewRecord, **changes: object) -> StoredRequest:
    values: dict[str, object] = {
        "endpoint": "payment_intents",
        "params": {"amount": new.event.amount_cents, "currency": new.event.currency},
        "api_version": API_VERSION,
        "upstream_key_id": "key-1",
        "idempotency_key": new.charge_key,
    }
    return StoredRequest(**(values | changes))  # type: ignore[arg-type]


def claimed(ledger: Ledger, new: NewRecord | None = None) -> Claim:
    """A record that has just been claimed for its first send."""
    new = new or new_record()
    claim = ledger.claim_new(new, request(new), "pm_card_visa")
    assert claim is not None
    return claim


def reread(ledger: Ledger, claim: Claim) -> Record:
    record = ledger.read(claim.record.charge_key).record
    assert record is not None
    return record


def outcome(kind: OutcomeKind = OutcomeKind.CHARGED, **fields: object) -> Outcome:
    values: dict[str, object] = {"payment_intent_id": "pi_1", "charge_id": "ch_1"}
    if kind is not OutcomeKind.CHARGED:
        values = {}
    return Outcome(kind=kind, **(values | fields))  # type: ignore[arg-type]


def at_once(count: int, run: Callable[[int], bool]) -> int:
    """Runs it on this many threads behind a barrier; how many were told yes.

    Who waited for a lock or a connection for so long that the ledger gave no answer was not.
    """
    barrier = Barrier(count)

    def one(number: int) -> bool:
        barrier.wait()
        try:
            return run(number)
        except LedgerUnavailable:
            return False

    with ThreadPoolExecutor(count) as pool:
        return sum(pool.map(one, range(count)))
