"""The way to Stripe, or to the vault in front of it: one exchange in, plain values out.

It never retries and never guesses; only a refused vault key is read again, and if it is another
one by now the request, which was not passed on, goes out with that.

A POST that moves money is sent at most once a call, under one deadline, and only when the last
check before the write agrees. Whatever then breaks is told as it is: not connected, not sent,
or broken, which proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import stripe

from models.billing_runs import RunState
from models.ledger import boot_clock_s
from models.outcomes import Reply, ReplyKind
from models.records import StoredRequest
from models.replies import BROKEN, OBJECT_NAMES, read_reply, text_of
from models.run_keys import RunKey
from tasks.deadline_http import Call, DeadlineClient, calling
from tasks.errors import CustomerUnknown, NotSent, StripeUnavailable
from tasks.rate_limit import RateLimiter
from tasks.requests import API_VERSION, encode_form, upstream_key_id
from tasks.vault_access import STALE, VaultAccess

PAGE_SIZE: Final = 100
MAX_PAGES: Final = 200
"""Of one customer's objects in one look-up; more than that is for a person."""
MAX_ACCOUNT_PAGES: Final = 100_000
"""Of all objects of the account: ten million."""

_NOT_CONNECTED: Final = Reply(kind=ReplyKind.NOT_CONNECTED, error_code="not_connected")
_NOT_SENT: Final = Reply(kind=ReplyKind.NOT_SENT, error_code="not_sent")
_RUN_CLOSED: Final = Reply(
    kind=ReplyKind.ANSWER, http_status=403, error_code="run_closed", forwarded=False
)
"""What the self-hosted vault says; a hosted one knows no runs."""
FORWARDED: Final = "Vault-Forwarded"
SEND_BEFORE: Final = "Vault-Send-Before"

Answer = tuple[int | None, Mapping[str, str] | None, object]
"""Status, headers and decoded body of one exchange."""


@dataclass(frozen=True, slots=True)
class StripeCustomer:
    """What a charge needs to know of a customer."""

    exists: bool
    """False for one that never was and for one that was deleted."""
    default_method: str | None = None


class StripeGateway:
    """Calls under one Stripe key, or through a vault under the keys of the billing runs.

    Build it after a fork; threads may share it.
    """

    def __init__(
        self,
        api_key: str,
        api_base: str,
        limiter: RateLimiter | None = None,
        http: stripe.HTTPClient | None = None,
        vault: VaultAccess | None = None,
    ) -> None:
        """With a `vault`, its URL and keys take the place of `api_key` and `api_base`.

        `http` obeys the `Call` of its context, as DeadlineClient does (which is the default).
        """
        # The library would otherwise report each call's duration with the next one.
        stripe.enable_telemetry = False
        self.vault = vault
        self.key_id = upstream_key_id(api_key if vault is None else vault.key_id_source)
        self.limiter = limiter
        self._http: Any = http or DeadlineClient()
        self._client = stripe.StripeClient(
            # Each call through a vault brings its own key.
            api_key if vault is None else "vault",
            stripe_version=API_VERSION,
            base_addresses={"api": api_base.rstrip("/") if vault is None else vault.url},
            http_client=self._http,
            max_network_retries=0,
        )

    def close(self) -> None:
        """Close the kept connections."""
        self._http.close()
        if self.limiter is not None:
            self.limiter.close()

    def is_marked(self, reply: Reply) -> bool:
        """Whether a reply has to be judged by its `Vault-Forwarded` header, or its lack."""
        return self.vault is not None and (not self.vault.hosted or reply.forwarded is not None)

    # -- money ---------------------------------------------------------------------------

    def ready(self, billing_run: str | None, currency: str | None) -> None:
        """Before a charge is prepared: its run is open, and its vault key at hand.

        Raises StripeUnavailable, `no_billing_run` above all.
        """
        if self.vault is not None:
            self.vault.ready(billing_run or "", currency or "")

    def admit(self, endpoint: str, deadline_s: float) -> None:
        """Wait for the turn of a create, before its record is claimed.

        Raises StripeUnavailable(`rate_limited`) when it would come after the deadline.
        """
        self._take(f"create:{endpoint}", deadline_s)

    def create(
        self,
        request: StoredRequest,
        deadline_s: float,
        before_write: Callable[[], None],
        lease_expires_at: datetime | None = None,
    ) -> Reply:
        """Send a stored request, to the byte; the reply as it came.

        `deadline_s` is on the boot-time clock; `before_write` raises NotSent to stop it. A vault
        of our own is told until when (ledger's clock) the request may be passed on: it may
        find it only when it thaws, with the record long settled. Its turn among all requests
        was taken by `admit`.
        """
        call = Call(deadline_s, encode_form(request.params), before_write)
        options: dict[str, Any] = {
            "idempotency_key": request.idempotency_key,
            "stripe_version": request.api_version,
        }
        if self.vault is not None and not self.vault.hosted and lease_expires_at is not None:
            options["headers"] = {SEND_BEFORE: f"{lease_expires_at.timestamp():.6f}"}
        try:
            bearer = self._run_key(request)
            if bearer is not None and self._is_closed(bearer):
                return _RUN_CLOSED
            answer = self._exchange(call, "post", f"/v1/{request.endpoint}", options, bearer)
        except NotSent:
            return _NOT_SENT
        except Exception:
            # Whatever broke, only the write decides what it proves.
            return BROKEN if call.began_to_write else _NOT_CONNECTED
        charge_key = request.params.get("metadata", {}).get("charge_key")
        reply = read_reply(request.endpoint, *answer, charge_key=charge_key)
        self._heed(reply.http_status, reply.error_code)
        return reply

    def cancel(self, payment_intent_id: str, deadline_s: float) -> Reply:
        """Cancel an intent that is still open; the reply as it came.

        Raises StripeUnavailable when its turn would come too late. No idempotency key of ours:
        a refusal would be replayed for a day, though the intent has opened again meanwhile.
        """
        self._take("cancel:payment_intents", deadline_s)
        call = Call(deadline_s, b"")
        path = f"/v1/payment_intents/{payment_intent_id}/cancel"
        bearer = self._any_key()
        try:
            answer = self._exchange(call, "post", path, {}, bearer)
        except Exception:
            return BROKEN if call.began_to_write else _NOT_CONNECTED
        reply = read_reply("payment_intents", *answer)
        self._heed(reply.http_status, reply.error_code)
        return reply

    # -- reads ---------------------------------------------------------------------------

    def customer(self, customer_id: str, deadline_s: float) -> StripeCustomer:
        """The customer as Stripe has it now. Raises StripeUnavailable."""
        found = self._get(f"/v1/customers/{customer_id}", {}, deadline_s)
        if found is None or found.get("deleted") is True:
            return StripeCustomer(exists=False)
        if found.get("object") != "customer":
            raise StripeUnavailable("unexpected_object")
        invoices = found.get("invoice_settings")
        preferred = invoices.get("default_payment_method") if isinstance(invoices, dict) else None
        method = text_of(preferred) or text_of(found.get("default_source"))
        return StripeCustomer(exists=True, default_method=method)

    def account_id(self, deadline_s: float) -> str | None:
        """The account of the key; None where the key may not read it. Raises StripeUnavailable."""
        found = self._get("/v1/account", {}, deadline_s, refusals=(401, 403, 404))
        return text_of(found)

    def retrieve(
        self, endpoint: str, object_id: str, deadline_s: float
    ) -> Mapping[str, Any] | None:
        """One intent or charge; None if there is none. Raises StripeUnavailable."""
        found = self._get(f"/v1/{endpoint}/{object_id}", {}, deadline_s)
        shown = None if found is None else (found.get("object"), found.get("id"))
        if shown is not None and shown != (OBJECT_NAMES[endpoint], object_id):
            raise StripeUnavailable("unexpected_object")
        return found

    def list_objects(
        self, endpoint: str, customer_id: str, created_gte: int, deadline_s: float
    ) -> Iterator[Mapping[str, Any]]:
        """All of a customer's objects since `created_gte` (Unix seconds), to the last page.

        Ends only where Stripe says that there are no more; raises StripeUnavailable otherwise.
        """
        params = {"customer": customer_id, "created": {"gte": created_gte}}
        pages = self._pages(endpoint, params, MAX_PAGES, lambda: deadline_s)
        return (item for page in pages for item in page)

    def list_account(
        self, endpoint: str, created_gte: int, page_s: float
    ) -> Iterator[Mapping[str, Any]]:
        """All objects of the account since `created_gte` (Unix seconds), newest first.

        Each page may take `page_s` seconds; nothing but the page at hand is kept. Ends only
        where Stripe says that there are no more; raises StripeUnavailable otherwise.
        """
        params = {"created": {"gte": created_gte}}
        pages = self._pages(endpoint, params, MAX_ACCOUNT_PAGES, lambda: boot_clock_s() + page_s)
        return (item for page in pages for item in page)

    def _pages(
        self,
        endpoint: str,
        wanted: Mapping[str, Any],
        max_pages: int,
        deadline_s: Callable[[], float],
    ) -> Iterator[list[Mapping[str, Any]]]:
        params: dict[str, Any] = {**wanted, "limit": PAGE_SIZE}
        for _ in range(max_pages):
            page = self._get(f"/v1/{endpoint}", params, deadline_s(), refusals=())
            objects = page.get("data") if page is not None else None
            has_more = page.get("has_more") if page is not None else None
            if not isinstance(objects, list) or not isinstance(has_more, bool):
                raise StripeUnavailable("unexpected_object")
            yield objects
            if not has_more:
                return
            if not objects:
                raise StripeUnavailable("unexpected_object")
            params["starting_after"] = text_of(objects[-1])
        raise StripeUnavailable("too_many_objects")

    # -- plumbing ------------------------------------------------------------------------

    def _get(
        self,
        path: str,
        params: Mapping[str, Any],
        deadline_s: float,
        refusals: tuple[int, ...] = (404,),
    ) -> dict[str, Any] | None:
        """A GET's object; None for a refusal that is an answer. Raises StripeUnavailable."""
        kind = path.split("/")[2]
        self._take(f"read:{kind}", deadline_s)
        query = encode_form(params).decode()
        target = f"{path}?{query}" if query else path
        bearer = self._any_key()
        try:
            answer = self._exchange(Call(deadline_s), "get", target, {}, bearer)
        except Exception:
            raise StripeUnavailable("no_readable_reply") from None
        self._check_forwarded(answer)
        status, _, data = answer
        if status is not None and 200 <= status < 300 and isinstance(data, dict):
            return data
        if status in refusals and isinstance(data, dict) and isinstance(data.get("error"), dict):
            return None
        error = data.get("error") if isinstance(data, dict) else None
        error = error if isinstance(error, dict) else {}
        self._heed(status, error.get("code"))
        if error.get("code") == "resource_missing" and error.get("param") == "customer":
            raise CustomerUnknown("customer_unknown")
        raise StripeUnavailable(f"http_{status}")

    def _take(self, endpoint: str, deadline_s: float) -> None:
        if self.limiter is not None:
            self.limiter.take(endpoint, deadline_s)

    def _heed(self, status: int | None, code: object) -> None:
        """Slow down when Stripe says so; an object in use by another request says nothing."""
        if status == 429 and code != "lock_timeout" and self.limiter is not None:
            self.limiter.slow_down()

    def _run_key(self, request: StoredRequest) -> RunKey | None:
        """The vault key of the run that a request spends on. Raises StripeUnavailable."""
        if self.vault is None:
            return None
        return self.vault.key_of(
            request.params["metadata"]["billing_run"], request.params["currency"]
        )

    def _any_key(self) -> RunKey | None:
        return None if self.vault is None else self.vault.any_key()

    def _is_closed(self, bearer: RunKey) -> bool:
        hosted = self.vault is not None and self.vault.hosted
        return hosted and bearer.state is RunState.CLOSED

    def _check_forwarded(self, answer: Answer) -> None:
        """Believe a read only if the vault says that it is Stripe's. Raises StripeUnavailable."""
        if self.vault is None or self.vault.hosted:
            return
        status, headers, data = answer
        if (headers or {}).get(FORWARDED) != "yes":
            raise StripeUnavailable(_error_code(data) or f"http_{status}")

    def _exchange(
        self,
        call: Call,
        method: str,
        path: str,
        options: Mapping[str, Any],
        bearer: RunKey | None,
    ) -> Answer:
        """One exchange, whatever the answer was; with a renewed vault key where one was refused."""
        if bearer is None or self.vault is None:
            return self._once(call, method, path, options)
        answer = self._once(call, method, path, {**options, "api_key": bearer.vault_key})
        if not _is_stale(answer):
            return answer
        # The vault passed nothing on: whatever breaks from here on, nothing was sent yet.
        call.began_to_write = False
        renewed = self.vault.renewed(bearer)
        if renewed is None:
            return answer
        return self._once(call, method, path, {**options, "api_key": renewed.vault_key})

    def _once(self, call: Call, method: str, path: str, options: Mapping[str, Any]) -> Answer:
        with calling(call):
            try:
                answer = self._client.raw_request(method, path, **options)
            except stripe.StripeError as error:
                # Where the body was not JSON, the library puts the headers in its place.
                data = error.json_body if isinstance(error.json_body, dict) else None
                return error.http_status, error.headers, data
        return answer.code, answer.headers, answer.data


def _error_code(data: object) -> str | None:
    error = data.get("error") if isinstance(data, Mapping) else None
    return text_of(error.get("code")) if isinstance(error, Mapping) else None


def _is_stale(answer: Answer) -> bool:
    """Whether a vault refused its key; what it passed on is Stripe's own answer."""
    status, headers, data = answer
    forwarded = (headers or {}).get(FORWARDED, "no") != "no"
    return status in (401, 403) and not forwarded and _error_code(data) in STALE
