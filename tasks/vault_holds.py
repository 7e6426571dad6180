"""Tells the vault what became of a charge, before the ledger is told.

In the other order a lost word would leave money held, or a later try refused, for a record whose
end is known. What is lost all the same is found by the sweep.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from models.errors import StateForbids
from models.keys import idempotency_key
from models.ledger import boot_clock_s
from models.left_holds import left_holds
from models.outcomes import Outcome, OutcomeKind
from models.vault_wire import VaultUnavailable, VaultWire
from tasks.alarms import Alarm, ring
from tasks.errors import StripeUnavailable

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Engine

    from models.ledger_actions import ChargedRow
    from models.records import Record
    from models.settings import Settings

BATCH: Final = 100
MAX_RESOLVED: Final = 500
"""Left holds of one sweep."""
RESOLVING_S: Final = 10.0
"""One sweep resolves no longer than this; the next one goes on."""

_WORD_OF: Final = {
    OutcomeKind.CHARGED: "settled",
    OutcomeKind.CARD_DECLINED: "failed",
    OutcomeKind.REJECTED: "failed",
    OutcomeKind.NOT_EXECUTED: "absent",
}
"""An open intent, and what nobody knows, keep their holds: nothing is said about them."""

logger = logging.getLogger(__name__)


class VaultHolds:
    """Resolves holds at the self-hosted vault; does nothing where there is none."""

    def __init__(self, wire: VaultWire | None, namespace: str) -> None:
        self._wire = wire
        self._namespace = namespace

    @classmethod
    def from_settings(cls, settings: Settings) -> VaultHolds:
        """A hosted vault has no holds to resolve."""
        wire = VaultWire.from_settings(settings) if settings.vault_mode == "self" else None
        return cls(wire, settings.charge_namespace)

    def close(self) -> None:
        """Close the kept connections."""
        if self._wire is not None:
            self._wire.close()

    def tell(
        self,
        record: Record,
        outcome: Outcome,
        epoch: int | None = None,
        *,
        seen_at: datetime | None = None,
    ) -> None:
        """Say what an epoch of a record (None: the one it is in) came to at Stripe.

        `seen_at`: when Stripe began to be asked, on the ledger's clock. A worker that slept since
        then must not let go of what another one has sent. Raises StripeUnavailable: `hold_open`
        while a forward of it may still be under way, or has begun since, `vault_unavailable`.
        The ledger must not be written then.
        """
        word = _WORD_OF.get(outcome.kind)
        if self._wire is None or word is None:
            return
        epoch = record.attempt_epoch if epoch is None else epoch
        epoch_of = (record.customer_id, record.billing_period, epoch)
        self._resolve(self._wire, epoch_of, word, outcome, seen_at)

    def tell_settled(self, row: ChargedRow) -> None:
        """Say that Stripe shows this charge, which the ledger has lost.

        Raises StripeUnavailable as `tell` does.
        """
        if self._wire is None:
            return
        outcome = Outcome(
            OutcomeKind.CHARGED, payment_intent_id=row.payment_intent_id, charge_id=row.charge_id
        )
        epoch_of = (row.customer_id, row.billing_period, row.attempt_epoch)
        self._resolve(self._wire, epoch_of, "settled", outcome)

    def _resolve(
        self,
        wire: VaultWire,
        epoch_of: tuple[str, str, int],
        word: str,
        outcome: Outcome,
        seen_at: datetime | None = None,
    ) -> None:
        settled = word == "settled"
        key = idempotency_key(*epoch_of, self._namespace)
        try:
            known = wire.resolve(
                key,
                word,
                payment_intent_id=outcome.payment_intent_id if settled else None,
                charge_id=outcome.charge_id if settled else None,
                # Money that was seen counts, whenever that was.
                seen_at=None if settled else seen_at,
            )
        except StateForbids:
            raise StripeUnavailable("hold_open") from None
        except VaultUnavailable:
            raise StripeUnavailable("vault_unavailable") from None
        if settled and not known:
            ring(Alarm.HOLD_MISSING, idempotency_key=key)

    def resolve_left(self, engine: Engine) -> int:
        """Resolve what settled records have left held, up to a limit; how many."""
        resolved = seen = after_id = 0
        until_s = boot_clock_s() + RESOLVING_S
        while self._wire is not None and seen < MAX_RESOLVED:
            found = left_holds(engine, limit=BATCH, after_id=after_id)
            for hold in found:
                if boot_clock_s() >= until_s:
                    return resolved
                try:
                    resolved += self._wire.resolve(
                        hold.idempotency_key,
                        hold.outcome,
                        payment_intent_id=hold.payment_intent_id,
                        charge_id=hold.charge_id,
                    )
                except StateForbids:
                    # A forward is still open: its outcome, or a later sweep, ends it.
                    continue
                except VaultUnavailable:
                    logger.warning("left_holds_wait", extra={"error_code": "vault_unavailable"})
                    return resolved
            seen += len(found)
            if len(found) < BATCH:
                break
            after_id = found[-1].id
        if resolved:
            logger.info("left_holds_resolved", extra={"resolved": resolved})
        return resolved
