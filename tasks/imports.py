"""Charges of an earlier system, taken over before the first event comes. One file, all or none."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from models.errors import DeadLetterReason, EventRefused
from models.events import event_from_json
from models.keys import charge_key
from models.ledger_actions import ChargedRow, ImportConflict, LedgerActions
from tasks.json_lines import BadLine, read_lines

if TYPE_CHECKING:
    from models.settings import Settings

REQUIRED: Final = (
    "customer_id",
    "billing_period",
    "stripe_customer_id",
    "charge_id",
    "amount_cents",
    "currency",
)
OPTIONAL: Final = ("payment_intent_id", "billing_run")
_CHARGE: Final = re.compile(r"(?:ch|py)_\w{1,250}", re.ASCII)
_INTENT: Final = re.compile(r"pi_\w{1,250}", re.ASCII)


def import_file(actions: LedgerActions, settings: Settings, path: Path) -> tuple[int, int]:
    """Take over all charges of a file; returns how many were new, and how many were known.

    Raises BadLine, with file and line number, for a line that cannot be read or whose identity
    stands in the ledger with another charge; nothing is changed then.
    """
    try:
        return actions.import_charges(read_lines(path, row_reader(settings)))
    except ImportConflict as conflict:
        why = "the ledger holds another charge for this identity"
        raise BadLine(str(path), conflict.line, why) from None


def row_reader(settings: Settings) -> Callable[[dict[str, Any]], ChargedRow]:
    """Reads one line's object under these settings; raises EventRefused."""

    def read(value: dict[str, Any]) -> ChargedRow:
        for name in REQUIRED:
            if value.get(name) is None:
                _refuse(f"{name} is missing")
        for name in value:
            if name not in REQUIRED + OPTIONAL:
                _refuse("a name that an import does not know")
        event = event_from_json(
            {name: value.get(name) for name in (*REQUIRED, "billing_run") if name != "charge_id"},
            max_amount_cents=settings.max_amount_cents,
        )
        intent, charge = _objects(value)
        return ChargedRow(
            customer_id=event.customer_id,
            billing_period=event.billing_period,
            charge_key=charge_key(
                event.customer_id, event.billing_period, settings.charge_namespace
            ),
            fingerprint=event.fingerprint,
            amount_cents=event.amount_cents,
            currency=event.currency,
            stripe_customer_id=event.stripe_customer_id,
            billing_run=event.billing_run,
            payment_intent_id=intent,
            charge_id=charge,
        )

    return read


def _objects(value: dict[str, Any]) -> tuple[str | None, str | None]:
    """(intent, charge): an earlier system may have kept the intent's id as its charge id."""
    charge, intent = value["charge_id"], value.get("payment_intent_id")
    if intent is not None and not _matches(_INTENT, intent):
        _refuse("payment_intent_id must be pi_ and word characters")
    if _matches(_CHARGE, charge):
        return intent, charge
    if not _matches(_INTENT, charge) or intent not in (None, charge):
        _refuse("charge_id must be ch_, py_ or pi_ and word characters")
    return charge, None


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _refuse(detail: str) -> NoReturn:
    raise EventRefused(DeadLetterReason.INVALID_EVENT, detail)
