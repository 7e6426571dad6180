"""The way to Stripe: one exchange in, plain values out. Never retries, never guesses.

A POST that moves money is sent at most once a call, under one deadline, and only when the last
check before the write agrees. Whatever then breaks is told as it is: not connected, not sent,
or broken, which proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import stripe

from models.ledger import boot_clock_s
from models.outcomes import Reply, ReplyKind
from models.records import StoredRequest
from models.replies import BROKEN, OBJECT_NAMES, read_reply, text_of
from tasks.deadline_http import Call, DeadlineClient, calling
from tasks.errors import CustomerUnknown, NotSent, StripeUnavailable
from tasks.rate_limit import RateLimiter
from tasks.requests import API_VERSION, encode_form, upstream_key_id

PAGE_SIZE: Final = 100
MAX_PAGES: Final = 200
"""Of one customer's objects in one look-up; more than that is for a person."""
MAX_ACCOUNT_PAGES: Final = 100_000
"""Of all objects of the account: ten million."""

_NOT_CONNECTED: Final = Reply(kind=ReplyKind.NOT_CONNECTED, error_code="not_connected")
_NOT_SENT: Final = Reply(kind=ReplyKind.NOT_SENT, error_code="not_sent")


@dataclass(frozen=True, slots=True)
class StripeCustomer:
    """What a charge needs to know of a customer."""

    exists: bool
    """False for one that never was and for one that was deleted."""
    default_method: str | None = None


class StripeGateway:
    """Calls under one Stripe key. Build it after a fork; threads may share it."""

    def __init__(
        self,
        api_key: str,
        api_base: str,
        limiter: RateLimiter | None = None,
        http: stripe.HTTPClient | None = None,
    ) -> None:
        """`http` obeys the `Call` of its context, as DeadlineClient does (which is the default)."""
        # The library would otherwise report each call's duration with the next one.
        stripe.enable_telemetry = False
        self.key_id = upstream_key_id(api_key)
        self.limiter = limiter
        self._http: Any = http or DeadlineClient()
        self._client = stripe.StripeClient(
            api_key,
            stripe_version=API_VERSION,
            base_addresses={"api": api_base.rstrip("/")},
            http_client=self._http,
            max_network_retries=0,
        )

    def close(self) -> None:
        """Close the kept connections."""
        self._http.close()
        if self.limiter is not None:
            self.limiter.close()

    # -- money ---------------------------------------------------------------------------

    def admit(self, endpoint: str, deadline_s: float) -> None:
        """Wait for the turn of a create, before its record is claimed.

        Raises StripeUnavailable(`rate_limited`) when it would come after the deadline.
        """
        self._take(f"create:{endpoint}", deadline_s)

    def create(
        self, request: StoredRequest, deadline_s: float, before_write: Callable[[], None]
    ) -> Reply:
        """Send a stored request, to the byte; the reply as it came.

        `deadline_s` is on the boot-time clock; `before_write` raises NotSent to stop it. Its
        turn among all requests was taken by `admit`.
        """
        call = Call(deadline_s, encode_form(request.params), before_write)
        options = {
            "idempotency_key": request.idempotency_key,
            "stripe_version": request.api_version,
        }
        try:
            answer = self._exchange(call, "post", f"/v1/{request.endpoint}", options)
        except NotSent:
            return _NOT_SENT
        except Exception:
            # Whatever broke, only the write decides what it proves.
            return BROKEN if call.began_to_write else _NOT_CONNECTED
        reply = read_reply(request.endpoint, *answer)
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
        try:
            answer = self._exchange(call, "post", path, {})
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
        if found is not None and found.get("object") != OBJECT_NAMES[endpoint]:
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
        try:
            status, _, data = self._exchange(
                Call(deadline_s), "get", f"{path}?{query}" if query else path, {}
            )
        except Exception:
            raise StripeUnavailable("no_readable_reply") from None
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

    def _exchange(
        self, call: Call, method: str, path: str, options: Mapping[str, str]
    ) -> tuple[int | None, Mapping[str, str] | None, object]:
        """Status, headers and decoded body of one exchange, whatever Stripe's answer was."""
        with calling(call):
            try:
                answer = self._client.raw_request(method, path, **options)
            except stripe.StripeError as error:
                # Where the body was not JSON, the library puts the headers in its place.
                data = error.json_body if isinstance(error.json_body, dict) else None
                return error.http_status, error.headers, data
        return answer.code, answer.headers, answer.data
