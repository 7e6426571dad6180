"""The vault's own requests: issue and revoke keys, resolve holds. All need the admin bearer."""

from __future__ import annotations

import hmac
import logging
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import unquote

from models.billing_runs import BillingRuns, Run
from models.errors import AmountRefused, EventRefused, LedgerUnavailable, NotFound, StateForbids
from models.events import check_id
from models.money import DEFAULT_CURRENCY, fold_currency
from models.strict_json import parse_strict_json
from models.vault_keys import ENDPOINTS, MAX_KEY_LIFE_S, VaultKeys
from vault.answers import AdminRefused, Answer, json_answer
from vault.holds import Holds, Moved
from vault.metrics import Metrics
from vault.verdicts import Verdict

KEY_FIELDS: Final = frozenset(
    {
        "vendor",
        "label",
        "daily_usd_cap",
        "allowed_endpoints",
        "expires_at",
        "billing_run",
        "currency",
        "cap_cents",
    }
)
RESOLVE_FIELDS: Final = frozenset({"outcome", "payment_intent_id", "charge_id", "seen_at"})
MAX_CAP_CENTS: Final = 2**63 - 1
CENTS_IN_A_DOLLAR: Final = 100

_RESOLVE: Final = re.compile(r"/vault/holds/([^/?]{1,800})/resolve")
_REVOKE: Final = re.compile(r"/vault/keys/(\d{1,18})/revoke")

logger = logging.getLogger(__name__)


class Admin:
    """Answers the requests under /vault/."""

    def __init__(self, runs: BillingRuns, holds: Holds, admin_key: str, metrics: Metrics) -> None:
        self._runs = runs
        self._keys = VaultKeys(runs.engine)
        self._holds = holds
        self._admin_key = admin_key.encode()
        self._metrics = metrics

    def is_admin(self, token: str | None) -> bool:
        """Whether a bearer is the admin's; takes as long for any token."""
        return hmac.compare_digest((token or "").encode(), self._admin_key)

    def answer(self, method: str, target: str, body: bytes) -> Answer:
        """The answer to a request whose bearer was right."""
        try:
            return self._route(method, target, body)
        except AdminRefused as refused:
            return refused.answer()
        except LedgerUnavailable:
            refusal = AdminRefused(503, "busy", "the vault cannot reach its database")
            return refusal.answer()

    def _route(self, method: str, target: str, body: bytes) -> Answer:
        if method != "POST":
            raise AdminRefused(405, "not_allowed", "only POST is taken here")
        if target == "/vault/keys":
            return self._issue(_object(body, KEY_FIELDS))
        if (found := _REVOKE.fullmatch(target)) is not None:
            return self._revoke(int(found[1]))
        if (found := _RESOLVE.fullmatch(target)) is not None:
            return self._resolve(unquote(found[1]), _object(body, RESOLVE_FIELDS))
        raise AdminRefused(404, "not_found", "there is no such endpoint")

    # -- keys ----------------------------------------------------------------------------

    def _issue(self, given: Mapping[str, Any]) -> Answer:
        if given.get("vendor", "stripe") != "stripe":
            raise AdminRefused(400, "invalid", "vendor must be stripe")
        label = _identity(given, "label")
        expires_at = _expires_at(given.get("expires_at"))
        endpoints = _endpoints(given.get("allowed_endpoints"))
        run = self._run(given, label)
        vault_key, key = self._keys.issue(
            run.id, label=label, endpoints=endpoints, expires_at=expires_at
        )
        logger.info("vault_key_issued", extra={"key_id": key.id, "run_id": run.id})
        return json_answer(
            200,
            {
                "id": key.id,
                "vault_key": vault_key,
                "label": key.label,
                "billing_run": run.billing_run,
                "currency": run.currency,
                "cap_cents": run.cap_cents,
                "allowed_endpoints": list(key.endpoints),
                "expires_at": key.expires_at.isoformat(),
            },
        )

    def _run(self, given: Mapping[str, Any], label: str) -> Run:
        """The budget that a new key points at; opened by the first key, never grown by another."""
        name = _identity(given, "billing_run") if given.get("billing_run") is not None else label
        try:
            currency = fold_currency(str(given.get("currency") or DEFAULT_CURRENCY))
        except AmountRefused as refused:
            raise AdminRefused(400, "invalid", str(refused)) from None
        cap = _cap(given, currency)
        run = self._runs.find(name, currency)
        if run is None:
            if cap is None:
                raise AdminRefused(400, "invalid", "a new budget needs cap_cents")
            run = self._runs.open_with_cap(name, currency, cap)
        if cap is not None and cap != run.cap_cents:
            raise AdminRefused(
                409, "cap_differs", "the budget has another cap; a key never changes it"
            )
        return run

    def _revoke(self, key_id: int) -> Answer:
        key = self._keys.revoke(key_id)
        if key is None:
            raise AdminRefused(404, "not_found", "there is no such key")
        logger.info("vault_key_revoked", extra={"key_id": key.id})
        assert key.revoked_at is not None
        return json_answer(200, {"id": key.id, "revoked_at": key.revoked_at.isoformat()})

    # -- holds ---------------------------------------------------------------------------

    def _resolve(self, idempotency_key: str, given: Mapping[str, Any]) -> Answer:
        outcome = given.get("outcome")
        verdicts = {
            "settled": Verdict.SETTLED,
            "failed": Verdict.FAILED,
            "absent": Verdict.FAILED,
        }
        if outcome not in verdicts:
            raise AdminRefused(400, "invalid", "outcome must be settled, failed or absent")
        try:
            moved = self._holds.resolve(
                idempotency_key,
                verdicts[outcome],
                absent=outcome == "absent",
                payment_intent_id=_optional_id(given, "payment_intent_id"),
                charge_id=_optional_id(given, "charge_id"),
                seen_at=_optional_moment(given, "seen_at"),
            )
        except NotFound as error:
            raise AdminRefused(404, "hold_unknown", str(error)) from None
        except StateForbids as error:
            raise AdminRefused(409, "hold_not_resolvable", str(error)) from None
        self._note(moved, outcome)
        state = {"idempotency_key": idempotency_key, "state": moved.next, "before": moved.before}
        return json_answer(200, state)

    def _note(self, moved: Moved, outcome: str) -> None:
        self._metrics.holds.labels(moved.next).inc()
        logger.info("vault_hold_resolved", extra={"hold_id": moved.hold_id, "outcome": outcome})
        for alarm, applies in (
            ("late_success", moved.is_late),
            ("double_charge", moved.other_object),
        ):
            if applies:
                self._metrics.alarms.labels(alarm).inc()
                logger.error("vault_alarm", extra={"alarm": alarm, "hold_id": moved.hold_id})


def _object(body: bytes, fields: frozenset[str]) -> dict[str, Any]:
    try:
        value = parse_strict_json(body)
    except EventRefused as refused:
        raise AdminRefused(400, "invalid", refused.detail) from None
    if not isinstance(value, dict):
        raise AdminRefused(400, "invalid", "the body must be a JSON object")
    for name in value:
        if name not in fields:
            raise AdminRefused(400, "invalid", "the body has a field that is not known")
    return value


def _identity(given: Mapping[str, Any], name: str) -> str:
    try:
        return check_id(name, given.get(name))
    except EventRefused as refused:
        raise AdminRefused(400, "invalid", refused.detail) from None


def _optional_id(given: Mapping[str, Any], name: str) -> str | None:
    return None if given.get(name) is None else _identity(given, name)


def _optional_moment(given: Mapping[str, Any], name: str) -> datetime | None:
    if given.get(name) is None:
        return None
    moment = _moment(given[name])
    if moment is None:
        raise AdminRefused(400, "invalid", f"{name} must be ISO 8601 with a zone")
    return moment


def _moment(given: object) -> datetime | None:
    """None for what is no ISO 8601 text with a zone."""
    try:
        moment = datetime.fromisoformat(given) if isinstance(given, str) else None
    except ValueError:
        return None
    return moment if moment is not None and moment.tzinfo is not None else None


def _cap(given: Mapping[str, Any], currency: str) -> int | None:
    cap, dollars = given.get("cap_cents"), given.get("daily_usd_cap")
    if cap is None and dollars is not None:
        # The hosted contract's word for it. Here it caps the run, not the day.
        if currency != "usd":
            raise AdminRefused(400, "invalid", "daily_usd_cap is for usd; give cap_cents")
        if type(dollars) is not int:
            raise AdminRefused(400, "invalid", "daily_usd_cap must be a whole number of dollars")
        cap = dollars * CENTS_IN_A_DOLLAR
    if cap is None:
        return None
    if type(cap) is not int or not 0 <= cap <= MAX_CAP_CENTS:
        raise AdminRefused(400, "invalid", "cap_cents must be a whole number, 0 or more")
    return cap


def _endpoints(given: object) -> Sequence[str]:
    """The calls a key is good for: names of `ENDPOINTS`, or their paths for every method."""
    if given is None:
        return ENDPOINTS
    if not isinstance(given, list) or not given:
        raise AdminRefused(400, "invalid", "allowed_endpoints must be a list of calls")
    chosen = [name for name in ENDPOINTS if name in given or name.partition(" ")[2] in given]
    known = {*chosen, *(name.partition(" ")[2] for name in chosen)}
    if any(entry not in known for entry in given):
        raise AdminRefused(
            400, "invalid", f"allowed_endpoints may name only: {', '.join(ENDPOINTS)}"
        )
    return chosen


def _expires_at(given: object) -> datetime | None:
    if given is None:
        return None
    if type(given) is int and 0 < given < 10**11:
        moment: datetime | None = datetime.fromtimestamp(given, UTC)
    else:
        moment = _moment(given)
    if moment is None:
        raise AdminRefused(400, "invalid", "expires_at must be ISO 8601 with a zone, or Unix time")
    if moment > datetime.now(UTC) + timedelta(seconds=MAX_KEY_LIFE_S):
        raise AdminRefused(400, "invalid", f"expires_at is at most {MAX_KEY_LIFE_S} s away")
    return moment
