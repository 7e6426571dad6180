"""The gateway to Stripe: what one exchange proves, and how long it may take."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from models.ledger import boot_clock_s
from models.outcomes import Reply, ReplyKind
from models.records import StoredRequest
from sandbox.ports import free_port
from tasks.errors import NotSent, StripeUnavailable
from tasks.requests import encode_form
from tasks.stripe_gateway import StripeCustomer, StripeGateway
from tests.support.waiting import wait_until
from tests.unit.scripted_server import (
    Answer,
    ScriptedServer,
    dripping,
    raw,
    reply,
    reset,
    serving,
    silence,
)

KEY = "sk_test_secret0123456789"
INTENT = {"id": "pi_1", "object": "payment_intent", "status": "succeeded", "latest_charge": "ch_1"}
REQUEST = StoredRequest(
    endpoint="payment_intents",
    params={"amount": 2500, "confirm": True, "metadata": {"b": "2", "a": "ü&="}},
    api_version="2026-10-28.endive",
    upstream_key_id="key-1",
    idempotency_key="0123456789abcdef0123456789abcdef",
)
DEADLINE_S = 0.6
SLACK_S = 0.5


def agree() -> None:
    """A last check that has nothing against the write."""


def create(
    url: str,
    *,
    within_s: float = 5.0,
    before_write: Callable[[], None] = agree,
    request: StoredRequest = REQUEST,
) -> Reply:
    gateway = StripeGateway(KEY, url)
    try:
        return gateway.create(request, boot_clock_s() + within_s, before_write)
    finally:
        gateway.close()


# --- what is sent --------------------------------------------------------------------------


def test_a_stored_request_goes_out_to_the_byte_whatever_the_order_of_its_names() -> None:
    shuffled = json.loads('{"metadata": {"a": "ü&=", "b": "2"}, "confirm": true, "amount": 2500}')
    with serving(reply(200, INTENT)) as server:
        create(server.url)
        create(server.url, request=StoredRequest(**{**_values(REQUEST), "params": shuffled}))
    bodies = [request.partition(b"\r\n\r\n")[2] for request in server.requests]
    assert bodies == [b"amount=2500&confirm=true&metadata[a]=%C3%BC%26%3D&metadata[b]=2"] * 2


def _values(request: StoredRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in type(request).__dataclass_fields__}


def test_key_version_and_idempotency_key_are_the_stored_ones_and_stand_in_headers_only() -> None:
    with serving(reply(200, INTENT)) as server:
        create(server.url)
    headers = dict(server.headers(server.requests[0]))
    assert headers["idempotency-key"] == REQUEST.idempotency_key
    assert headers["stripe-version"] == REQUEST.api_version
    assert headers["authorization"] == f"Bearer {KEY}"
    assert REQUEST.idempotency_key.encode() not in server.requests[0].partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("value", [1.5, None, b"x", [1]])
def test_a_parameter_that_is_no_text_integer_or_flag_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        encode_form({"amount": value})


def test_proxy_settings_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    with serving(reply(200, INTENT)) as server:
        assert create(server.url).kind is ReplyKind.ANSWER


@pytest.mark.parametrize("status", [409, 429, 500, 503])
def test_nothing_is_sent_twice_even_where_stripe_says_retry(status: int) -> None:
    answer = reply(status, {"error": {"type": "api_error"}}, Stripe_Should_Retry="true")
    with serving(answer) as server:
        assert create(server.url).http_status == status
    assert len(server.requests) == 1


def test_a_redirect_is_not_followed() -> None:
    with serving(reply(307, {"error": {"type": "x"}}, Location="/v1/other")) as server:
        assert create(server.url).http_status == 307
    assert len(server.requests) == 1


# --- nothing reached Stripe -----------------------------------------------------------------


def test_a_refused_connection_is_not_connected() -> None:
    assert create(f"http://127.0.0.1:{free_port()}").kind is ReplyKind.NOT_CONNECTED


def test_an_unknown_host_is_not_connected() -> None:
    assert create("http://stripe.invalid").kind is ReplyKind.NOT_CONNECTED


def test_a_failed_tls_handshake_is_not_connected() -> None:
    with serving(raw(b"not TLS at all\r\n\r\n", close=True)) as server:
        answer = create(server.url.replace("http:", "https:"), within_s=2.0)
    assert answer.kind is ReplyKind.NOT_CONNECTED
    assert KEY.encode() not in b"".join(server.requests)


def test_a_tls_handshake_that_never_ends_is_over_at_the_deadline() -> None:
    with serving(silence) as server:
        began_s = time.monotonic()
        answer = create(server.url.replace("http:", "https:"), within_s=DEADLINE_S)
    assert answer.kind is ReplyKind.NOT_CONNECTED
    assert time.monotonic() - began_s < DEADLINE_S + SLACK_S


def test_the_last_check_stops_the_call_on_a_standing_connection_before_any_byte() -> None:
    def refuse() -> None:
        raise NotSent("the lease is over")

    with serving(reply(200, INTENT)) as server:
        assert create(server.url, before_write=refuse).kind is ReplyKind.NOT_SENT
        wait_until(lambda: server.connections == 1, 5, "the connection is seen")
    assert server.requests == []


def test_a_call_whose_time_is_over_writes_nothing() -> None:
    with serving(reply(200, INTENT)) as server:
        assert create(server.url, within_s=-0.1).kind is ReplyKind.NOT_CONNECTED
    assert server.requests == []


# --- it may have reached Stripe ---------------------------------------------------------------


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(reset, id="reset"),
        pytest.param(raw(b"", close=True), id="closed_without_a_word"),
        pytest.param(raw(OK + b'{"id": "pi_1", "object"', close=True), id="truncated"),
        pytest.param(raw(b"HTTP/1.1 200 OK\r\nContent-Le", close=True), id="truncated_head"),
        pytest.param(raw(b"garbage\r\n\r\n", close=True), id="not_http"),
        pytest.param(reply(502, "<html>Bad Gateway</html>"), id="html_502"),
        pytest.param(reply(200, ""), id="empty_200"),
        pytest.param(reply(200, "[1, 2]"), id="a_list"),
        pytest.param(reply(200, '{"id": "pi_1", '), id="half_json"),
        pytest.param(reply(200, {"id": "cus_1", "object": "customer"}), id="another_object"),
        pytest.param(reply(404, "not found"), id="plain_404"),
        pytest.param(reply(404, {"message": "no route"}), id="404_without_envelope"),
        pytest.param(reply(400, {"error": "bad"}), id="error_that_is_no_envelope"),
        pytest.param(reply(200, '"' + "x" * 9_000_000 + '"'), id="endless"),
    ],
)
def test_whatever_breaks_after_the_write_proves_nothing(answer: Answer) -> None:
    with serving(answer) as server:
        assert create(server.url).kind is ReplyKind.BROKEN
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(silence, id="silence"),
        pytest.param(dripping(b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 100), id="dripped_head"),
        pytest.param(
            dripping(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n" + b" " * 500),
            id="dripped_body",
        ),
        pytest.param(
            dripping(
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 100
            ),
            id="dripped_chunks",
        ),
    ],
)
def test_the_deadline_is_over_the_whole_call(answer: Answer) -> None:
    with serving(answer) as server:
        began_s = time.monotonic()
        assert create(server.url, within_s=DEADLINE_S).kind is ReplyKind.BROKEN
        assert time.monotonic() - began_s < DEADLINE_S + SLACK_S


# --- kept connections -------------------------------------------------------------------------


def test_a_connection_is_used_again() -> None:
    with serving(reply(200, INTENT)) as server:
        kinds = _twice(server)
    assert kinds == [ReplyKind.ANSWER] * 2
    assert server.connections == 1


def test_a_kept_connection_that_the_server_closed_is_not_written_to() -> None:
    body = json.dumps(INTENT).encode()
    closing = raw(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body, close=True)
    with serving(closing) as server:
        gateway = StripeGateway(KEY, server.url)
        first = gateway.create(REQUEST, boot_clock_s() + 5, agree)
        wait_until(lambda: server.ended == 1, 5, "the server has closed the connection")
        second = gateway.create(REQUEST, boot_clock_s() + 5, agree)
        gateway.close()
    assert (first.kind, second.kind) == (ReplyKind.ANSWER, ReplyKind.ANSWER)
    assert server.connections == 2


def test_a_kept_connection_that_breaks_under_the_second_request_is_unknown_and_not_repeated() -> (
    None
):
    with serving(reply(200, INTENT), reset) as server:
        assert _twice(server) == [ReplyKind.ANSWER, ReplyKind.BROKEN]
    assert len(server.requests) == 2


def test_what_is_left_of_a_broken_reply_is_not_read_as_the_next_one() -> None:
    late = raw(OK + b" " * 150)
    with serving(late, reply(200, INTENT)) as server:
        gateway = StripeGateway(KEY, server.url)
        first = gateway.create(REQUEST, boot_clock_s() + DEADLINE_S, agree)
        second = gateway.create(REQUEST, boot_clock_s() + 5, agree)
        gateway.close()
    assert (first.kind, second.kind) == (ReplyKind.BROKEN, ReplyKind.ANSWER)


def _twice(server: ScriptedServer) -> list[ReplyKind]:
    gateway = StripeGateway(KEY, server.url)
    try:
        return [gateway.create(REQUEST, boot_clock_s() + 5, agree).kind for _ in range(2)]
    finally:
        gateway.close()


# --- what the reply says ----------------------------------------------------------------------


def test_a_success_is_read_into_plain_values() -> None:
    answer = reply(200, INTENT, Request_Id="req_1", Idempotent_Replayed="true")
    with serving(answer) as server:
        seen = create(server.url)
    assert seen == Reply(
        kind=ReplyKind.ANSWER,
        http_status=200,
        object_status="succeeded",
        payment_intent_id="pi_1",
        charge_id="ch_1",
        request_id="req_1",
        replayed=True,
    )


def test_a_decline_keeps_its_codes_and_its_intent() -> None:
    error = {
        "type": "card_error",
        "code": "card_declined",
        "decline_code": "insufficient_funds",
        "message": "Your card has insufficient funds." + "x" * 400,
        "charge": "ch_9",
        "payment_intent": {"id": "pi_9", "object": "payment_intent"},
    }
    with serving(reply(402, {"error": error})) as server:
        seen = create(server.url)
    assert (seen.error_code, seen.decline_code) == ("card_declined", "insufficient_funds")
    assert (seen.payment_intent_id, seen.charge_id) == ("pi_9", "ch_9")
    assert len(seen.error_message or "") == 300


def test_the_message_of_a_refused_key_quotes_it_and_is_dropped() -> None:
    error = {"type": "invalid_request_error", "message": f"Invalid API Key provided: {KEY}"}
    with serving(reply(401, {"error": error})) as server:
        seen = create(server.url)
    assert seen.http_status == 401
    assert KEY not in repr(seen)


@pytest.mark.parametrize(("header", "forwarded"), [("yes", True), ("no", False)])
def test_the_vaults_word_is_read(header: str, forwarded: bool) -> None:
    with serving(reply(200, INTENT, Vault_Forwarded=header)) as server:
        assert create(server.url).forwarded is forwarded


def test_an_uncaptured_charge_is_not_paid() -> None:
    charge = {"id": "ch_1", "object": "charge", "status": "succeeded", "captured": False}
    request = StoredRequest(**{**_values(REQUEST), "endpoint": "charges"})
    with serving(reply(200, charge)) as server:
        assert create(server.url, request=request).object_status == "requires_capture"


# --- reads ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (404, {"error": {"code": "resource_missing"}}, StripeCustomer(exists=False)),
        (200, {"object": "customer", "deleted": True}, StripeCustomer(exists=False)),
        (200, {"object": "customer"}, StripeCustomer(exists=True)),
        (
            200,
            {"object": "customer", "default_source": "card_1"},
            StripeCustomer(exists=True, default_method="card_1"),
        ),
        (
            200,
            {
                "object": "customer",
                "default_source": "card_1",
                "invoice_settings": {"default_payment_method": "pm_1"},
            },
            StripeCustomer(exists=True, default_method="pm_1"),
        ),
    ],
)
def test_how_a_customer_pays_by_default(
    status: int, body: dict[str, Any], expected: StripeCustomer
) -> None:
    with serving(reply(status, body)) as server:
        gateway = StripeGateway(KEY, server.url)
        assert gateway.customer("cus_1", boot_clock_s() + 5) == expected
        gateway.close()


@pytest.mark.parametrize(
    "answer", [reset, silence, reply(500, {"error": {}}), reply(404, "no"), reply(200, {})]
)
def test_a_customer_that_was_not_read_is_not_a_missing_one(answer: Answer) -> None:
    with serving(answer) as server:
        gateway = StripeGateway(KEY, server.url)
        with pytest.raises(StripeUnavailable):
            gateway.customer("cus_1", boot_clock_s() + DEADLINE_S)
        gateway.close()


def test_a_list_is_read_to_its_last_page() -> None:
    pages = [
        reply(200, {"data": [{"id": "pi_3"}, {"id": "pi_2"}], "has_more": True}),
        reply(200, {"data": [{"id": "pi_1"}], "has_more": False}),
    ]
    with serving(*pages) as server:
        found = _listed(server)
    assert [item["id"] for item in found] == ["pi_3", "pi_2", "pi_1"]
    first, second = (request.split(b" ")[1] for request in server.requests)
    assert first == b"/v1/payment_intents?created%5Bgte%5D=1000&customer=cus_1&limit=100"
    assert second.endswith(b"&starting_after=pi_2")


@pytest.mark.parametrize(
    "second",
    [
        reset,
        reply(500, {"error": {}}),
        reply(404, {"error": {}}),
        reply(200, {"data": []}),
        reply(200, {"data": [], "has_more": True}),
        reply(200, {"has_more": False}),
    ],
)
def test_a_list_that_breaks_off_is_not_a_complete_one(second: Answer) -> None:
    first = reply(200, {"data": [{"id": "pi_1"}], "has_more": True})
    with serving(first, second) as server, pytest.raises(StripeUnavailable):
        _listed(server)


def _listed(server: ScriptedServer) -> list[Any]:
    gateway = StripeGateway(KEY, server.url)
    try:
        return list(gateway.list_objects("payment_intents", "cus_1", 1000, boot_clock_s() + 5))
    finally:
        gateway.close()


def test_the_digest_of_a_key_tells_keys_apart_and_nothing_more() -> None:
    one, other = (StripeGateway(key, "http://127.0.0.1").key_id for key in (KEY, KEY + "x"))
    assert one != other
    assert one not in KEY
    assert len(one) == 16
