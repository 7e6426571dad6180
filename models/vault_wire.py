"""The vault's wire contract from the client's side: ask for a key, say what became of a hold.

One thin client for the self-hosted vault and a hosted one. The hosted one knows US dollars and a
daily cap only, and has no resolve: what it cannot do is said, not papered over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import urllib3

from models.billing_runs import Run
from models.errors import ChargebridgeError, StateForbids
from models.urls import check_http_url
from models.vault_keys import ENDPOINTS, KEY_LIFE_S

if TYPE_CHECKING:
    from models.settings import Settings

TIMEOUT_S: Final = 5.0
"""Of a request to the vault's own endpoints, which call nobody."""
CENTS_IN_A_DOLLAR: Final = 100


class VaultUnavailable(ChargebridgeError):  # noqa: N818 - says what happened
    """The vault did not answer, or not as it should: whether it acted is unknown."""


class VaultWire:
    """The vault's own endpoints under VAULT_URL, with the admin bearer."""

    def __init__(self, url: str, admin_key: str) -> None:
        check_http_url("VAULT_URL", url)
        self._url = url.rstrip("/")
        self._headers = {
            "Authorization": f"Bearer {admin_key}",
            "Content-Type": "application/json",
        }
        self._http = urllib3.PoolManager(maxsize=4)

    @classmethod
    def from_settings(cls, settings: Settings) -> VaultWire:
        """Raises ConfigurationError without VAULT_URL and VAULT_ADMIN_KEY."""
        settings.require("vault_url", "vault_admin_key")
        return cls(settings.vault_url, settings.vault_admin_key)

    def issue(self, run: Run) -> str:
        """A key of a hosted vault for a run. Raises StateForbids for another currency than usd."""
        if run.currency != "usd":
            raise StateForbids("a hosted vault caps US dollars only")
        expires_at = datetime.now(UTC) + timedelta(seconds=KEY_LIFE_S)
        status, reply = self._post(
            "/vault/keys",
            {
                "vendor": "stripe",
                "label": f"{run.billing_run}/{run.currency}",
                "daily_usd_cap": run.cap_cents // CENTS_IN_A_DOLLAR,
                "allowed_endpoints": list(ENDPOINTS),
                "expires_at": expires_at.isoformat(timespec="seconds"),
            },
        )
        vault_key = reply.get("vault_key")
        if not 200 <= status < 300 or not isinstance(vault_key, str) or not vault_key:
            raise VaultUnavailable(f"the vault issued no key (status {status})")
        return vault_key

    def resolve(
        self,
        idempotency_key: str,
        outcome: str,
        *,
        payment_intent_id: str | None = None,
        charge_id: str | None = None,
        seen_at: datetime | None = None,
    ) -> bool:
        """Tell the self-hosted vault what became of a hold: `settled`, `failed` or `absent`.

        `seen_at`: the moment of the ledger's clock from which on the evidence knows nothing.
        False when the vault holds nothing under this key. Raises StateForbids for a failure of a
        hold that is settled, still under way or was sent again since, VaultUnavailable when it
        cannot be asked.
        """
        body = {"outcome": outcome}
        if payment_intent_id is not None:
            body["payment_intent_id"] = payment_intent_id
        if charge_id is not None:
            body["charge_id"] = charge_id
        if seen_at is not None:
            body["seen_at"] = seen_at.isoformat()
        status, reply = self._post(f"/vault/holds/{quote(idempotency_key, safe='')}/resolve", body)
        error = reply.get("error")
        code = error.get("code") if isinstance(error, Mapping) else None
        if status == 200:
            return True
        if code == "hold_unknown":
            return False
        if code == "hold_not_resolvable":
            raise StateForbids("the vault's hold is settled, still open, or was sent since")
        raise VaultUnavailable(f"the vault did not resolve a hold (status {status})")

    def close(self) -> None:
        """Close the kept connections."""
        self._http.clear()

    def _post(self, path: str, body: Mapping[str, object]) -> tuple[int, dict[str, Any]]:
        try:
            reply = self._http.request(
                "POST",
                self._url + path,
                body=json.dumps(body).encode(),
                headers=self._headers,
                timeout=TIMEOUT_S,
                retries=False,
                redirect=False,
            )
            value = json.loads(reply.data)
        except (urllib3.exceptions.HTTPError, ValueError):
            raise VaultUnavailable("the vault did not answer") from None
        return reply.status, value if isinstance(value, dict) else {}
