"""Reconciles a billing run: what was expected, what the ledger says, what Stripe shows.

Stripe's lists are read, and what the ledger has lost is adopted, before anything is published.
Knows nothing of Celery.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from models.errors import ChargebridgeError, EventRefused
from models.events import event_from_json
from models.keys import charge_key
from models.ledger import Applied, boot_clock_s
from models.outcomes import Outcome, OutcomeKind
from models.reconciling import HARMLESS, Verdict
from tasks.alarms import Alarm, ring
from tasks.errors import StripeUnavailable
from tasks.json_lines import BadLine, read_raw_lines
from tasks.look_up import seen_object
from tasks.reconcile_scratch import Scratch, Seen
from tasks.recover import charged_row
from tasks.requests import CHARGES, PAYMENT_INTENTS

if TYPE_CHECKING:
    from models.billing_runs import BillingRuns
    from models.ledger import Ledger
    from models.ledger_actions import ChargedRow, LedgerActions
    from models.ledger_reads import LedgerReads
    from models.settings import Settings
    from tasks.stripe_gateway import StripeGateway
    from tasks.vault_holds import VaultHolds

PAGE: Final = 500
PAGE_S: Final = 60.0
CLOCK_MARGIN_S: Final = 24 * 3600
LOOK_BACK_S: Final = 35 * 24 * 3600
"""How far back Stripe is listed for a run that the ledger has no record of."""
MAX_RETRIEVED: Final = 1_000
"""Charges of the ledger that are older than the list and are asked about one by one."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Summary:
    """How many lines of each verdict, the totals by currency, and what keeps the run open."""

    billing_run: str
    counts: Counter[str] = field(default_factory=Counter)
    adopted: int = 0
    republished: int = 0
    held: int = 0
    refunded: int = 0
    disputed: int = 0
    ledger_total_cents: Counter[str] = field(default_factory=Counter)
    stripe_total_cents: Counter[str] = field(default_factory=Counter)
    expected_total_cents: Counter[str] = field(default_factory=Counter)

    @property
    def why_not(self) -> list[str]:
        """What keeps the run from being closed; empty when it may be."""
        found = [
            f"{count} {verdict.replace('_', ' ')}"
            for verdict, count in sorted(self.counts.items())
            if Verdict(verdict) not in HARMLESS
        ]
        return found + ([f"{self.held} held at the vault"] if self.held else [])

    @property
    def last_line(self) -> str:
        """The one line that says whether the run may be closed."""
        if self.why_not:
            return f"run {self.billing_run} must not be closed: {', '.join(self.why_not)}"
        return f"run {self.billing_run} may be closed"


class Reconciliation:
    """One run of it; `scratch` holds the lines afterwards."""

    def __init__(
        self,
        billing_run: str,
        settings: Settings,
        *,
        ledger: Ledger,
        reads: LedgerReads,
        actions: LedgerActions,
        runs: BillingRuns,
        gateway: StripeGateway,
        holds: VaultHolds,
    ) -> None:
        self.billing_run = billing_run
        self.settings = settings
        self.ledger = ledger
        self.reads = reads
        self.actions = actions
        self.runs = runs
        self.gateway = gateway
        self.holds = holds
        self.scratch = Scratch()
        self._oldest: datetime | None = None
        self._adopted = 0

    def close(self) -> None:
        """Forget the lines."""
        self.scratch.close()

    def run(self, expected: Path | None = None, since: datetime | None = None) -> None:
        """Collect the three stories and adopt what the ledger has lost.

        `since`: Stripe is listed from here on; None: from a day before the run's first record.
        Raises BadLine for the expected file and ChargebridgeError when Stripe's lists could not
        be read; nothing is changed then.
        """
        if expected is not None:
            self._read_expected(expected)
        self._read_ledger()
        try:
            self._read_stripe(since)
            self._ask_about_older()
        except StripeUnavailable as error:
            raise ChargebridgeError(
                f"Stripe's lists were not read to their end ({error.code}); nothing was changed"
            ) from None
        self._refuse_unknown_run()
        self._adopt()

    def _refuse_unknown_run(self) -> None:
        """A name that was mistyped must not come out as a run that may be closed."""
        if next(self.scratch.lines(), None) is None and not self.runs.list(
            billing_run=self.billing_run
        ):
            raise ChargebridgeError(
                f"nothing is known of the billing run {self.billing_run}: no record, no charge, "
                "no budget"
            )

    def missing(self) -> Iterator[bytes]:
        """The original bytes of the expected events that neither ledger nor Stripe knows."""
        for key in self.scratch.keys_with(Verdict.MISSING):
            yield self.scratch.body(key)

    def summary(self) -> Summary:
        """The counts over all lines."""
        summary = Summary(self.billing_run, adopted=self._adopted)
        for line in self.scratch.lines():
            summary.counts[line.verdict] += 1
            summary.refunded += line.refunded_cents > 0
            summary.disputed += line.disputed
            currency = line.currency or ""
            summary.expected_total_cents[currency] += line.expected_cents or 0
            summary.stripe_total_cents[currency] += line.stripe_cents or 0
            if line.ledger_state == "charged":
                summary.ledger_total_cents[currency] += line.ledger_cents or 0
        for run in self.runs.list(billing_run=self.billing_run):
            summary.held += self.runs.report(run.billing_run, run.currency).open_holds
        return summary

    # -- the three stories ---------------------------------------------------------------

    def _read_expected(self, path: Path) -> None:
        for number, raw, value in read_raw_lines(path):
            try:
                event = event_from_json(value, max_amount_cents=self.settings.max_amount_cents)
            except EventRefused as refused:
                raise BadLine(str(path), number, refused.detail) from None
            if event.billing_run != self.billing_run:
                raise BadLine(str(path), number, "belongs to another billing run")
            key = charge_key(
                event.customer_id, event.billing_period, self.settings.charge_namespace
            )
            earlier = self.scratch.expect(number, key, event, raw)
            if earlier is not None:
                raise BadLine(str(path), number, f"contradicts the money fields of line {earlier}")

    def _read_ledger(self) -> None:
        after_key = ""
        while True:
            page = self.reads.list(limit=PAGE, after_key=after_key, billing_run=self.billing_run)
            self.scratch.add_records(page)
            for record in page:
                self._oldest = min(self._oldest or record.created_at, record.created_at)
            if len(page) < PAGE:
                break
            after_key = page[-1].charge_key
        # An event's first delivery decides its run; a tombstone has none.
        for keys in self.scratch.unknown_to_ledger():
            self.scratch.add_records(self.reads.by_keys(keys))

    def _read_stripe(self, since: datetime | None) -> None:
        if since is None:
            back_s = CLOCK_MARGIN_S if self._oldest is not None else LOOK_BACK_S
            since = (self._oldest or self.ledger.read("").now) - timedelta(seconds=back_s)
        created_gte = int(since.timestamp())
        for endpoint in (PAYMENT_INTENTS, CHARGES):
            for item in self.gateway.list_account(endpoint, created_gte, PAGE_S):
                self._see(item)

    def _ask_about_older(self) -> None:
        """Charges that the ledger took over from elsewhere can be older than the list."""
        for key in self.scratch.keys_with(Verdict.NOT_AT_STRIPE)[:MAX_RETRIEVED]:
            intent, charge = self.scratch.objects_of(key)
            for endpoint, object_id in ((PAYMENT_INTENTS, intent), (CHARGES, charge)):
                if object_id is None:
                    continue
                found = self.gateway.retrieve(endpoint, object_id, boot_clock_s() + PAGE_S)
                if found is not None:
                    self._see(found)

    def _see(self, item: Mapping[str, Any]) -> None:
        seen = seen_object(item)
        is_charge = item.get("object") == "charge"
        if is_charge:
            marked = seen.payment_intent_id or seen.charge_id or ""
            refunded, disputed = _given_back(item)
            if self.scratch.mark(marked, refunded, disputed=disputed):
                return
        metadata = item.get("metadata") or {}
        ours = metadata.get("billing_run") == self.billing_run
        key = seen.charge_key
        if key is None or not (ours or self.scratch.concerns(key)):
            key = self.scratch.key_of_object(seen.payment_intent_id, seen.charge_id)
        if key is None:
            return
        success = seen.kind is OutcomeKind.CHARGED
        object_id = (seen.payment_intent_id or seen.charge_id) or ""
        self.scratch.add_seen(
            Seen(
                object_id=object_id,
                charge_key=key,
                amount_cents=seen.amount_cents,
                currency=seen.currency,
                success=success,
                is_open=not success and not seen.is_dead,
                intent=seen.payment_intent_id,
                charge=seen.charge_id,
                customer_id=metadata.get("customer_id"),
                billing_period=metadata.get("billing_period"),
                row=charged_row(item, self.settings.charge_namespace) if success else None,
            )
        )
        if is_charge:
            self.scratch.mark(object_id, refunded, disputed=disputed)

    # -- what the ledger has lost --------------------------------------------------------

    def _adopt(self) -> None:
        for key in self.scratch.keys_with(Verdict.LOST):
            row, intent, charge = self.scratch.success_of(key)
            before = self.ledger.read(key).record
            other_money = (
                before is not None
                and row is not None
                and before.is_other_money(row.amount_cents, row.currency)
            )
            if row is not None and not other_money:
                self._tell_vault(row)
            if before is None:
                # Without metadata that fits its key it is somebody else's: for a person.
                self._adopted += self.actions.recover_charged([row]) if row is not None else 0
            else:
                self._late(key, row, intent, charge)
            after = self.ledger.read(key).record
            if after is not None:
                self.scratch.add_records([after], adopted=after != before)

    def _tell_vault(self, row: ChargedRow) -> None:
        try:
            self.holds.tell_settled(row)
        except StripeUnavailable as error:
            raise ChargebridgeError(
                f"the vault could not be told of a charge that the ledger has lost ({error.code}); "
                "what was not adopted yet is with the next reconcile"
            ) from None

    def _late(
        self, key: str, row: ChargedRow | None, intent: str | None, charge: str | None
    ) -> None:
        outcome = Outcome(OutcomeKind.CHARGED, payment_intent_id=intent, charge_id=charge)
        shown = row.shown() if row is not None else None
        # Without metadata that fits its key it may be anybody's.
        applied = self.ledger.late_truth(key, outcome, shown, doubtful=row is None).applied
        logger.info("reconcile_late_truth", extra={"charge_key": key, "applied": applied})
        if applied is Applied.LATE_REVIEW:
            ring(Alarm.LATE_SUCCESS, charge_key=key)
        elif applied is Applied.DOUBLE_CHARGE:
            ring(Alarm.DOUBLE_CHARGE, charge_key=key)
        self._adopted += applied is Applied.LATE_CHARGED


def _given_back(item: Mapping[str, Any]) -> tuple[int, bool]:
    refunded = item.get("amount_refunded")
    return (refunded if isinstance(refunded, int) else 0), item.get("disputed") is True
