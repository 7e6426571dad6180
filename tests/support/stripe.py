"""A handle on a running Stripe simulator, through its admin interface."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from sandbox.health import get_json, request


class Stripe:
    """`base_url` is what STRIPE_API_BASE must say."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url

    def charges(self, **match: Any) -> list[dict[str, Any]]:
        """Every charge that took money (id, amount, currency, customer, metadata …)."""
        data = get_json(f"{self.base_url}/_sim/charges")["data"]
        return [c for c in data if all(c.get(k) == v for k, v in match.items())]

    def requests(self, **match: Any) -> list[dict[str, Any]]:
        """Every request as it came (method, path, idempotency_key, charge_key, status …)."""
        data = get_json(f"{self.base_url}/_sim/requests")["data"]
        return [r for r in data if all(r.get(k) == v for k, v in match.items())]

    def creates(self, **match: Any) -> list[dict[str, Any]]:
        """The requests that would take money."""
        paths = ("/v1/payment_intents", "/v1/charges")
        return [r for r in self.requests(method="POST", **match) if r["path"] in paths]

    def fault(
        self,
        kind: str,
        *,
        stage: str = "before",
        times: int = 1,
        seconds: float | None = None,
        **match: str,
    ) -> None:
        """The next `times` matching creates go wrong (match: method, path, customer …)."""
        fault: dict[str, Any] = {"match": match, "stage": stage, "kind": kind, "times": times}
        if seconds is not None:
            fault["seconds"] = seconds
        self._post("faults", fault)

    def release(self) -> None:
        """Every request that a latency or a timeout holds goes on now."""
        self._post("release", {})

    def forget_faults(self) -> None:
        """No fault strikes any more; what is held stays held."""
        request("DELETE", f"{self.base_url}/_sim/faults")

    def clock(self, advance_s: float) -> None:
        self._post("clock", {"advance_s": advance_s})

    def reset(self) -> None:
        """Forgets charges, requests, faults, keys; the clock runs normally again."""
        self._post("reset", {})

    def complete(self, object_id: str) -> None:
        """The customer pays an open intent."""
        self._post("complete", {"id": object_id})

    def settle(self, object_id: str, outcome: str = "succeeded") -> None:
        """A bank debit that was `processing` ends (`succeeded` or `failed`)."""
        self._post("settle", {"id": object_id, "outcome": outcome})

    def refund(self, charge_id: str, amount: int | None = None) -> None:
        """Somebody gives money back in Stripe's dashboard."""
        self._post("refund", {"id": charge_id} | ({} if amount is None else {"amount": amount}))

    def form(
        self, path: str, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> dict[str, Any]:
        """A POST to Stripe's own API by somebody else; names in bracket notation."""
        sent = urllib.request.Request(
            f"{self.base_url}{path}",
            urllib.parse.urlencode(fields).encode(),
            {"Authorization": "Bearer sk_test_somebody", **(headers or {})},
        )
        with urllib.request.urlopen(sent, timeout=30) as reply:
            found: dict[str, Any] = json.loads(reply.read())
        return found

    def change_customer(self, customer: str, default_payment_method: str) -> None:
        """The customer has another card from now on."""
        name = "invoice_settings[default_payment_method]"
        self.form(f"/v1/customers/{customer}", **{name: default_payment_method})

    def charge_elsewhere(
        self, customer: str, amount: int, currency: str = "usd", **metadata: str
    ) -> dict[str, Any]:
        """A charge that this deployment's ledger knows nothing of."""
        fields = {f"metadata[{name}]": value for name, value in metadata.items()}
        return self.form(
            "/v1/payment_intents",
            amount=amount,
            currency=currency,
            customer=customer,
            payment_method="pm_card_visa",
            confirm="true",
            off_session="true",
            **fields,
        )

    def _post(self, action: str, body: dict[str, Any]) -> Any:
        reply = request("POST", f"{self.base_url}/_sim/{action}", body)
        return json.loads(reply) if reply else None
