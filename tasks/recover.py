"""After a database restore: what the copy does not know is read from Stripe, or looked up.

No worker starts while it runs. Safe to run again after any end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from models.billing_runs import BillingRuns
from models.errors import ChargebridgeError, EventRefused
from models.events import event_from_json
from models.hold_recovery import rebuild_holds
from models.keys import charge_key
from models.ledger_actions import ChargedRow, LedgerActions
from models.money import MAX_TOTAL_CENTS
from models.outcomes import OutcomeKind, state_after
from tasks.alarms import Alarm, ring
from tasks.errors import StripeUnavailable
from tasks.look_up import seen_object
from tasks.requests import CHARGES, PAYMENT_INTENTS

if TYPE_CHECKING:
    from models.settings import Settings
    from models.states import State
    from tasks.stripe_gateway import StripeGateway

PAGE_S: Final = 60.0
MAX_NAMED: Final = 3
"""Runs in one line."""
CLOCK_MARGIN_S: Final = 3600
"""The list begins this long before: Stripe's clock and the database's may differ."""

_KEPT: Final = (OutcomeKind.CHARGED, OutcomeKind.PROCESSING, OutcomeKind.REQUIRES_ACTION)
"""What a lost record stood for: money that was taken, or that may still be."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recovered:
    """`seen` successes with our metadata; `charged` records made or changed by them; `open`
    records made for objects that may still take money; `looked_up` records that were unsettled;
    `skipped` objects of another namespace or with broken metadata."""

    seen: int
    charged: int
    open: int
    looked_up: int
    skipped: int


class Recovery:
    """Recovers one ledger from one Stripe account."""

    def __init__(self, actions: LedgerActions, gateway: StripeGateway, settings: Settings) -> None:
        self.settings = settings
        self.actions = actions
        self.gateway = gateway
        self.namespace = settings.charge_namespace
        self._seen: set[bytes] = set()
        self._open: dict[str, tuple[ChargedRow, State]] = {}
        self._runs: set[tuple[str, str]] = set()
        self._skipped = 0

    def run(self, since: datetime) -> Recovered:
        """Make every success since then `charged`, and every unsettled record one to look up.

        What is open at Stripe and has no record gets one, which is polled.

        The vault's holds and budgets are then made to agree with the ledger.
        Raises ChargebridgeError when Stripe's lists could not be read to their end, or when the
        copy does not know a run that was charged in: workers stay locked out until it has run to
        its end once.
        """
        self.actions.start_recovery(since)
        try:
            charged = self.actions.recover_charged(self._successes(since))
        except StripeUnavailable as error:
            raise ChargebridgeError(
                f"Stripe's lists were not read to their end ({error.code}): run it again; "
                "until then no worker starts"
            ) from None
        still_open = self.actions.recover_open(self._open.values())
        looked_up = self.actions.recover_unsettled(since)
        self.actions.recover_times()
        if self.settings.vault_mode == "self":
            self._rebuild_holds(since)
        self.actions.end_recovery()
        return Recovered(len(self._seen), charged, still_open, looked_up, self._skipped)

    def _rebuild_holds(self, since: datetime) -> None:
        """Have the self-hosted vault's budgets agree with the ledger; no other has any here."""
        engine = self.actions.engine
        runs = BillingRuns(engine, self.actions.actor)
        lost = [f"{run} ({unit})" for run, unit in sorted(self._runs) if not runs.find(run, unit)]
        if lost:
            more = "" if len(lost) <= MAX_NAMED else f" and {len(lost) - MAX_NAMED} more"
            raise ChargebridgeError(
                f"no budget counts what was charged in the run {', '.join(lost[:MAX_NAMED])}"
                f"{more}: `run open` it, then run this again; until then no worker starts"
            )
        endpoint = self.settings.stripe_charge_api
        rebuilt = rebuild_holds(engine, since, self.namespace, endpoint)
        logger.info("holds_rebuilt", extra={"holds": rebuilt.holds, "budgets": rebuilt.budgets})

    def _successes(self, since: datetime) -> Iterator[ChargedRow]:
        created_gte = int(since.timestamp()) - CLOCK_MARGIN_S
        for endpoint in (PAYMENT_INTENTS, CHARGES):
            for item in self.gateway.list_account(endpoint, created_gte, PAGE_S):
                row = self._row(endpoint, item)
                if row is not None:
                    yield row

    def _row(self, endpoint: str, item: Mapping[str, Any]) -> ChargedRow | None:
        seen = seen_object(item)
        if seen.kind not in _KEPT or seen.charge_key is None:
            return None
        if endpoint == CHARGES and seen.payment_intent_id is not None:
            # Its intent was in the other list.
            return None
        row = charged_row(item, self.namespace)
        if row is None:
            self._skipped += 1
            logger.warning("recovery_skipped", extra={"object": str(item.get("id"))})
            return None
        self._runs.add((row.billing_run, row.currency))
        if seen.kind is not OutcomeKind.CHARGED:
            # The newest first: it is of the last epoch.
            self._open.setdefault(row.charge_key, (row, state_after(seen.kind)))
            return None
        self._count(row)
        return row

    def _count(self, row: ChargedRow) -> None:
        key = bytes.fromhex(row.charge_key)
        if key in self._seen:
            ring(Alarm.DOUBLE_CHARGE, charge_key=row.charge_key)
        self._seen.add(key)


def charged_row(item: Mapping[str, Any], namespace: str) -> ChargedRow | None:
    """The ledger's row for a success of ours; None if its metadata does not fit its charge key."""
    metadata = item.get("metadata") or {}
    seen = seen_object(item)
    fields = {
        "customer_id": metadata.get("customer_id"),
        "billing_period": metadata.get("billing_period"),
        "billing_run": metadata.get("billing_run"),
        "amount_cents": seen.amount_cents,
        "currency": seen.currency,
        "stripe_customer_id": item.get("customer"),
    }
    try:
        event = event_from_json(fields, max_amount_cents=MAX_TOTAL_CENTS)
    except EventRefused:
        return None
    if charge_key(event.customer_id, event.billing_period, namespace) != seen.charge_key:
        return None
    return ChargedRow(
        customer_id=event.customer_id,
        billing_period=event.billing_period,
        charge_key=seen.charge_key,
        fingerprint=event.fingerprint,
        amount_cents=event.amount_cents,
        currency=event.currency,
        stripe_customer_id=event.stripe_customer_id,
        billing_run=event.billing_run,
        payment_intent_id=seen.payment_intent_id,
        charge_id=seen.charge_id,
        attempt_epoch=seen.epoch or 0,
        created=created if isinstance(created := item.get("created"), int) else None,
    )
