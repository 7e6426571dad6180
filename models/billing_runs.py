"""Billing runs: what a (billing run, currency) is expected to come to, and its cap.

The budget belongs to the run and not to a key: a cap a day, or a cap a key, would let one run
spend twice. Several currencies are several budgets and are never summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import TextClause

from models import billing_runs_sql as sql
from models.database import rows
from models.errors import LedgerUnavailable, NotFound, StateForbids
from models.money import cap_cents, fold_currency

if TYPE_CHECKING:
    from sqlalchemy import Engine, RowMapping

MAX_CLOSING_S: Final = 60.0
"""Closing takes two statements; what is `closing` for so long was abandoned."""


class RunState(StrEnum):
    OPEN = "open"
    CLOSING = "closing"
    """New holds wait; the run closes, or is open again at once."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Run:
    """One budget, as it was read. Amounts in the currency's smallest unit."""

    id: int
    billing_run: str
    currency: str
    expected_total_cents: int | None
    """None where the budget came over the vault's wire contract, which names a cap only."""
    cap_cents: int
    settled_cents: int
    held_cents: int
    state: RunState
    vault_key_encrypted: str | None = field(repr=False)
    vault_key_expires_at: datetime | None
    created_at: datetime
    closed_at: datetime | None

    @property
    def free_cents(self) -> int:
        """What new holds may still take; below 0 only after a late success."""
        return self.cap_cents - self.settled_cents - self.held_cents


@dataclass(frozen=True, slots=True)
class Sum:
    """Billing records in some states: how many, and their amounts."""

    records: int = 0
    total_cents: int = 0

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.records + other.records, self.total_cents + other.total_cents)


@dataclass(frozen=True, slots=True)
class RunReport:
    """A run with what the ledger says of it."""

    run: Run
    charged: Sum
    unsettled: Sum
    blocked: Sum
    in_review: Sum
    processing: Sum
    not_held_cents: int
    """Of the unsettled, what no hold stands for yet."""
    open_holds: int

    @property
    def forecast_cents(self) -> int:
        """What the run comes to when everything that the ledger knows goes through."""
        return self.run.settled_cents + self.run.held_cents + self.not_held_cents

    @property
    def cap_will_hold(self) -> bool:
        """Whether all known events fit under the cap, the blocked ones included."""
        return self.forecast_cents + self.blocked.total_cents <= self.run.cap_cents


UNFINISHED_STATES: Final = ("reserved", "sent", "processing", "review")
MAX_RUNS: Final = 1000
"""Budgets in one list."""


class BillingRuns:
    """The budgets of one database. `actor` stands in the audit."""

    def __init__(self, engine: Engine, actor: str) -> None:
        self.engine = engine
        self.actor = actor

    # -- reads ---------------------------------------------------------------------------

    def find(self, billing_run: str, currency: str) -> Run | None:
        """The budget of a run in one currency."""
        found = self._rows(
            sql.FIND, {"billing_run": billing_run, "currency": fold_currency(currency)}
        )
        return _run(found[0]) if found else None

    def get(self, billing_run: str, currency: str) -> Run:
        """The same; raises NotFound."""
        run = self.find(billing_run, currency)
        if run is None:
            raise NotFound(f"no billing run of this name in {fold_currency(currency)}")
        return run

    def list(
        self, *, billing_run: str | None = None, after_id: int = 0, limit: int = MAX_RUNS
    ) -> Sequence[Run]:
        """Budgets in the order of their opening."""
        values = {"billing_run": billing_run, "after_id": after_id, "limit": limit}
        return [_run(row) for row in self._rows(sql.LIST, values)]

    def newest(self) -> Run | None:
        """The budget that was opened last, of whatever run."""
        found = self._rows(sql.NEWEST, {})
        return _run(found[0]) if found else None

    def report(self, billing_run: str, currency: str) -> RunReport:
        """A run, what the ledger says of it, and whether the cap will hold. Raises NotFound."""
        run = self.get(billing_run, currency)
        name = {"billing_run": run.billing_run, "currency": run.currency}
        sums = {
            row["state"]: Sum(row["records"], row["total_cents"])
            for row in self._rows(sql.TOTALS, name)
        }

        def of(*states: str) -> Sum:
            return sum((sums.get(state, Sum()) for state in states), Sum())

        return RunReport(
            run=run,
            charged=of("charged"),
            unsettled=of("reserved", "sent"),
            blocked=of("blocked"),
            in_review=of("review"),
            processing=of("processing"),
            not_held_cents=self._rows(sql.NOT_HELD, name)[0]["total_cents"],
            open_holds=self._rows(sql.OPEN_HOLDS, {"id": run.id})[0]["holds"],
        )

    # -- moves ---------------------------------------------------------------------------

    def open(
        self, billing_run: str, currency: str, expected_total_cents: int, reason: str | None = None
    ) -> Run:
        """Open a run, its cap a tenth above what is expected; one that is open as it is stays.

        Raises StateForbids for a run with another total, or one that is closed;
        AmountRefused for a total or a currency that cannot be.
        """
        run = self._open(billing_run, currency, expected_total_cents, reason)
        if run.expected_total_cents != expected_total_cents:
            raise StateForbids("the run is open with another expected total: use `run raise`")
        if run.state is RunState.CLOSED:
            raise StateForbids("the run is closed")
        return run

    def find_or_open(self, billing_run: str, currency: str, expected_total_cents: int) -> Run:
        """The run whatever its state, opened if there is none: for workers that may open runs."""
        found = self.find(billing_run, currency)
        return found or self._open(billing_run, currency, expected_total_cents, "auto")

    def open_with_cap(self, billing_run: str, currency: str, cap: int) -> Run:
        """The run whatever its state, opened with this cap if there is none."""
        values = {
            "billing_run": billing_run,
            "currency": fold_currency(currency),
            "expected_total_cents": None,
            "cap_cents": cap,
        }
        self._rows(sql.OPEN, values | self._audit("open", "wire contract"))
        return self.get(billing_run, currency)

    def _open(
        self, billing_run: str, currency: str, expected_total_cents: int, reason: str | None
    ) -> Run:
        values = {
            "billing_run": billing_run,
            "currency": fold_currency(currency),
            "expected_total_cents": expected_total_cents,
            "cap_cents": cap_cents(expected_total_cents),
        }
        opened = self._rows(sql.OPEN, values | self._audit("open", reason))
        return _run(opened[0]) if opened else self.get(billing_run, currency)

    def raise_cap(
        self, billing_run: str, currency: str, expected_total_cents: int, reason: str
    ) -> Run:
        """Expect more, and so allow more. Raises StateForbids for less, or a closed run."""
        run = self.get(billing_run, currency)
        if not reason.strip():
            raise StateForbids("raising a cap needs a reason")
        values = {
            "id": run.id,
            "expected_total_cents": expected_total_cents,
            "cap_cents": cap_cents(expected_total_cents),
        }
        raised = self._rows(sql.RAISE, values | self._audit("raise", reason))
        if not raised:
            raise StateForbids(
                "the run is closed"
                if self.get(billing_run, currency).state is RunState.CLOSED
                else f"the cap is {run.cap_cents} already, and a cap is only ever raised"
            )
        return _run(raised[0])

    def close(self, billing_run: str, currency: str) -> Run:
        """Close a run with nothing left in it; raises StateForbids, and the run is open again.

        A late event is then `blocked`. Whatever else ends it, the run is open again as well: at
        once, or by `reopen_abandoned` for a process that was killed.
        """
        run = self.get(billing_run, currency)
        if run.state is RunState.CLOSED:
            return run
        self._rows(sql.BEGIN_CLOSING, {"id": run.id} | self._audit("closing", None))
        try:
            closed = self._rows(sql.CLOSE, {"id": run.id} | self._audit("close", None))
            left = "" if closed else self._left(run)
        except BaseException:
            # Ctrl-C too: a run that stayed `closing` would take no new charge, without end.
            with suppress(LedgerUnavailable):
                self._open_again(run, "closing was broken off")
            raise
        if closed:
            return _run(closed[0])
        self._open_again(run, left)
        now = self.get(billing_run, currency)
        if now.state is RunState.CLOSED:
            return now  # somebody else closed it in between
        raise StateForbids(f"the run cannot be closed: {left}")

    def _open_again(self, run: Run, why: str) -> None:
        again = {"id": run.id, "from_state": RunState.CLOSING}
        self._rows(sql.REOPEN, again | self._audit("reopen", why))

    def reopen_abandoned(self) -> int:
        """Open again what somebody began to close and did not end, for the sweep; how many."""
        values = {"closing_s": MAX_CLOSING_S} | self._audit("reopen", "closing was abandoned")
        return len(self._rows(sql.REOPEN_ABANDONED, values))

    def reopen(self, billing_run: str, currency: str, reason: str) -> Run:
        """Open a closed run again, with the cap it had. Raises StateForbids for any other."""
        run = self.get(billing_run, currency)
        if not reason.strip():
            raise StateForbids("opening a closed run again needs a reason")
        again = {"id": run.id, "from_state": RunState.CLOSED}
        opened = self._rows(sql.REOPEN, again | self._audit("reopen", reason))
        if not opened:
            raise StateForbids("the run is not closed")
        return _run(opened[0])

    def _left(self, run: Run) -> str:
        """What keeps a run from being closed, in words."""
        report = self.report(run.billing_run, run.currency)
        counts = {
            "unsettled": report.unsettled.records,
            "processing": report.processing.records,
            "in review": report.in_review.records,
            "held": report.open_holds,
        }
        left = [f"{count} {what}" for what, count in counts.items() if count]
        return ", ".join(left) or "something was under way a moment ago; try again"

    # -- plumbing ------------------------------------------------------------------------

    def _rows(self, statement: TextClause, values: dict[str, Any]) -> Sequence[RowMapping]:
        return rows(self.engine, statement, values)

    def _audit(self, move: str, reason: str | None) -> dict[str, Any]:
        return {"move": move, "actor": self.actor, "reason": reason}


def _run(row: RowMapping) -> Run:
    values = {name: row[name] for name in Run.__dataclass_fields__}
    values["state"] = RunState(values["state"])
    return Run(**values)
