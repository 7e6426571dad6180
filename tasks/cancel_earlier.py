"""Before money is asked for again: what earlier tries left at Stripe is paid, canceled or dead.

An intent that was declined or that waits for the customer can still be paid. Before each send of
a recharge, and before a record is voided, every object of the charge key is listed: money is
taken over, what is open is canceled, and only a list without anything open lets go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from models.lookups import Evidence, Finding, SeenObject, judge
from models.outcomes import Outcome, OutcomeKind
from tasks.errors import CustomerUnknown, StripeUnavailable
from tasks.look_up import list_charge, wanted_of

if TYPE_CHECKING:
    from models.ledger import Ledger
    from models.ledger_reads import LedgerReads
    from models.records import Record
    from tasks.stripe_gateway import StripeGateway
    from tasks.vault_holds import VaultHolds

ROUNDS: Final = 3
"""Of listing and canceling: the last list must show nothing open."""
_MONEY_ONLY: Final = Evidence(proof_time=False, customer_exists=True, store_spoilt=False)
"""Failures and absence prove nothing here and are not asked for."""


_DEAD: Final = Outcome(OutcomeKind.CARD_DECLINED)


class Clear(StrEnum):
    """What the earlier objects of a charge key came to."""

    NOTHING_OPEN = "nothing_open"
    MONEY = "money"
    """One of them took money, or may have: `finding` says what to write."""
    MOVED = "moved"
    """Somebody else acts on the record: nothing was canceled."""


@dataclass(frozen=True, slots=True)
class Cleared:
    clear: Clear
    finding: Finding | None = None


class EarlierObjects:
    """Lists and cancels with one ledger and one gateway."""

    def __init__(
        self,
        ledger: Ledger,
        reads: LedgerReads,
        gateway: StripeGateway,
        holds: VaultHolds | None = None,
    ) -> None:
        self.ledger = ledger
        self.reads = reads
        self.gateway = gateway
        self.holds = holds

    def clear(self, record: Record, deadline_s: float) -> Cleared:
        """See to it that nothing of this record can take money but what is sent from now on.

        `deadline_s` is on the boot-time clock. Raises StripeUnavailable when that could not be
        established; some of what was open may be canceled by then, which changes nothing.
        """
        attempts = self.reads.attempts(record.charge_key)
        for _ in range(ROUNDS):
            listed = self._list(record, attempts, deadline_s)
            left = [item for item in listed if not item.is_dead and not item.has_money]
            if not left:
                return self._judged(record, listed)
            if self._moved(record):
                # What is open can be another worker's send of this very epoch.
                return Cleared(Clear.MOVED)
            for item in left:
                self._cancel(item, deadline_s)
        raise StripeUnavailable("not_canceled")

    def _judged(self, record: Record, listed: Sequence[SeenObject]) -> Cleared:
        """Nothing is open any more: whether money was taken, and the vault's holds told so."""
        finding = judge(wanted_of(record), listed, _MONEY_ONLY)
        if finding.outcome.kind is not OutcomeKind.UNKNOWN:
            self._tell(record, finding.outcome, finding.epoch)
            return Cleared(Clear.MONEY, finding)
        self._tell_dead(record)
        return Cleared(Clear.NOTHING_OPEN)

    def _list(
        self, record: Record, attempts: Sequence[Mapping[str, Any]], deadline_s: float
    ) -> list[SeenObject]:
        try:
            return list_charge(self.gateway, record, attempts, deadline_s)
        except CustomerUnknown:
            if any(row["payment_intent_id"] or row["charge_id"] for row in attempts):
                raise
            # The account never had this customer, so it has nothing of theirs either.
            return []

    def _moved(self, record: Record) -> bool:
        now = self.ledger.read(record.charge_key).record
        return now is None or _version(now) != _version(record)

    def _tell(self, record: Record, outcome: Outcome, epoch: int | None) -> None:
        if self.holds is not None:
            self.holds.tell(record, outcome, epoch)

    def _tell_dead(self, record: Record) -> None:
        """An earlier epoch's hold would keep the vault from taking another for this charge.

        Each of them, whether or not it has left an object or an attempt: its refusal may have
        been lost with a vault that died, and its attempts with a database that was restored.
        """
        for epoch in range(record.attempt_epoch):
            self._tell(record, _DEAD, epoch)

    def _cancel(self, item: SeenObject, deadline_s: float) -> None:
        """Ask for it; the next list says what came of it."""
        if item.payment_intent_id is None:
            raise StripeUnavailable("open_charge")
        self.gateway.cancel(item.payment_intent_id, deadline_s)


def _version(record: Record) -> tuple[object, ...]:
    return (record.state, record.attempt_epoch, record.lease_token, record.attempts)
