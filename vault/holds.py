"""Holds: money that is set aside before a request goes out, and settled or released after it.

reserved → sent → settled | released | unknown. Settled plus held never passes the run's cap, an
unknown keeps holding, and one charge key has at most one live hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID, uuid4

from models.errors import NotFound, StateForbids
from models.outcomes import History, Outcome, OutcomeKind, Reply, classify
from models.quick_rows import QuickRows, RowTaken
from vault import holds_sql as sql
from vault.answers import Refused
from vault.rules import Money
from vault.verdicts import HoldState, Verdict, judge, verdict_of

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Engine

    from models.limits import Limits

TRIES: Final = 4
"""Of a hold whose rows another request changed in between."""
START_WITHIN_S: Final = 10.0
"""From the commit of `sent` to the first byte, on the boot-time clock."""
OPEN_MARGIN_S: Final = 5.0
"""Beyond the longest forward there can be, for the commit of its outcome."""


@dataclass(frozen=True, slots=True)
class Forward:
    """The committed right to send once."""

    hold_id: int
    token: UUID
    before: HoldState
    is_first: bool
    forwards: int

    @property
    def earlier_unknown(self) -> bool:
        """Whether an earlier forward of the key may have taken the money."""
        return self.before in (HoldState.SENT, HoldState.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Moved:
    """A hold that was written."""

    hold_id: int
    before: HoldState
    next: HoldState
    other_object: bool
    """A second success, with another object than the first: two charges for one key."""

    @property
    def is_late(self) -> bool:
        """A success of a hold that had been released: the cap may be passed by it."""
        return self.before is HoldState.RELEASED and self.next is HoldState.SETTLED


@dataclass(frozen=True, slots=True)
class Seen:
    """An object of Stripe's as it passed by in a read or a cancel."""

    charge_key: str
    attempt_epoch: int | None
    payment_intent_id: str | None
    charge_id: str | None
    verdict: Verdict
    status: str


class Holds:
    """The holds of one database, taken under one Stripe account key."""

    def __init__(
        self, engine: Engine, limits: Limits, upstream_key_id: str, connections: int = 1
    ) -> None:
        self._rows = QuickRows(engine, connections)
        self.limits = limits
        self.upstream_key_id = upstream_key_id

    def check_key(self, key_hash: str, rule: str) -> None:
        """Let a read or a cancel pass: expired and revoked keys are good for those."""
        found = self._rows(sql.CHECK_KEY, {"key_hash": key_hash, "rule": rule})
        if not found:
            raise Refused("key_unknown")
        if not found[0]["permitted"]:
            raise Refused("endpoint_refused", "the vault key is not good for this call")

    def take(self, key_hash: str, rule: str, money: Money) -> int:
        """Set money aside, or find the hold that has it already. Raises Refused."""
        values = {
            "key_hash": key_hash,
            "rule": rule,
            "endpoint": money.endpoint,
            "idempotency_key": money.idempotency_key,
            "charge_key": money.charge_key,
            "attempt_epoch": money.attempt_epoch,
            "billing_run": money.billing_run,
            "currency": money.currency,
            "amount_cents": money.amount_cents,
            "send_before": money.send_before_s,
            "upstream_key_id": self.upstream_key_id,
            "resend_window_s": self.limits.resend_window_s,
        }
        for _ in range(TRIES):
            try:
                row = self._rows(sql.TAKE, values)[0]
            except RowTaken:
                # Another request was first with the same key; what it did can be seen now.
                continue
            else:
                hold_id = judge(row, money.amount_cents)
                if hold_id is not None:
                    return hold_id
        raise Refused("busy", "the hold is being changed by other requests")

    def begin(self, hold_id: int, money: Money) -> Forward | None:
        """Commit `sent`; None when the hold was released, or its time went by, since."""
        token = uuid4()
        values = {
            "id": hold_id,
            "token": token,
            "send_before": money.send_before_s,
            "upstream_key_id": self.upstream_key_id,
            "resend_window_s": self.limits.resend_window_s,
            "open_s": self.limits.vault_upstream_s + START_WITHIN_S + OPEN_MARGIN_S,
        }
        found = self._rows(sql.BEGIN, values)
        if not found:
            return None
        row = found[0]
        before = HoldState(row["before"])
        return Forward(hold_id, token, before, row["is_first"], row["forwards"])

    def end(self, forward: Forward, reply: Reply) -> Moved:
        """Judge the reply by the one table that the workers judge by, and write it down."""
        outcome = classify(reply, History(forward.earlier_unknown, vaulted=False))
        if_not_first = classify(reply, History(earlier_unknown=True, vaulted=False))
        values = {
            **_written(verdict_of(outcome.kind), outcome),
            "id": forward.hold_id,
            "token": forward.token,
            "certain": outcome.kind is if_not_first.kind,
            "only_forward": forward.forwards,
            "forget": forward.is_first and outcome.kind is OutcomeKind.NOT_EXECUTED,
        }
        return _moved(self._rows(sql.END, values)[0])

    def observe(self, seen: Seen) -> Sequence[Moved]:
        """Write down what an object that passed by shows of its hold, if it shows anything."""
        values = {
            "charge_key": seen.charge_key,
            "attempt_epoch": seen.attempt_epoch,
            "payment_intent_id": seen.payment_intent_id,
            "charge_id": seen.charge_id,
            "verdict": seen.verdict,
            "outcome": seen.status,
            "proof_of_absence_s": self.limits.proof_of_absence_s,
            **_NO_FORWARD,
        }
        return [_moved(row) for row in self._rows(sql.OBSERVE, values)]

    def resolve(
        self,
        idempotency_key: str,
        verdict: Verdict,
        *,
        absent: bool = False,
        payment_intent_id: str | None = None,
        charge_id: str | None = None,
        seen_at: datetime | None = None,
    ) -> Moved:
        """Write down what somebody who asked Stripe found, at `seen_at` of the ledger's clock.

        `absent`: Stripe never executed the key, so that its window starts anew. Raises NotFound,
        and StateForbids for a failure of a hold that is settled, still under way, or was sent
        again since.
        """
        values = {
            "idempotency_key": idempotency_key,
            "verdict": verdict,
            "outcome": "absent" if absent else f"resolved_{verdict}",
            "payment_intent_id": payment_intent_id,
            "charge_id": charge_id,
            "seen_at": seen_at,
            **_NO_FORWARD,
            "forget": absent,
        }
        found = self._rows(sql.RESOLVE, values)
        if not found:
            raise NotFound("no hold of this idempotency key")
        row = found[0]
        if row["id"] is None:
            raise StateForbids(_why_not(row))
        return _moved(row)

    def list(
        self,
        *,
        limit: int,
        after_id: int = 0,
        billing_run: str | None = None,
        state: HoldState | None = None,
    ) -> Sequence[dict[str, Any]]:
        """Holds in the order of their making."""
        values = {
            "limit": limit,
            "after_id": after_id,
            "billing_run": billing_run,
            "state": state,
        }
        return self._rows(sql.LIST, values)

    def close(self) -> None:
        """Close the kept connections."""
        self._rows.close()


_NO_FORWARD: Final[Mapping[str, Any]] = {"token": None, "only_forward": None, "forget": False}


def _written(verdict: Verdict, outcome: Outcome) -> dict[str, Any]:
    return {
        "verdict": verdict,
        "outcome": outcome.kind,
        "payment_intent_id": outcome.payment_intent_id,
        "charge_id": outcome.charge_id,
    }


def _why_not(row: Mapping[str, Any]) -> str:
    if row["was"] == "settled":
        return "the hold is settled"
    return "a forward is still open" if row["is_open"] else "it was sent again since it was seen"


def _moved(row: Mapping[str, Any]) -> Moved:
    return Moved(
        hold_id=row["id"],
        before=HoldState(row["before"]),
        next=HoldState(row["next"]),
        other_object=row["other_object"],
    )
