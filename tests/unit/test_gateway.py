"""The gateway to Stripe: what one exchange proves, and how long it may take."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import replace

import pytest

from models.ledger import boot_clock_s
from models.outcomes import ReplyKind
from sandbox.ports import free_port
from tasks.errors import NotSent
from tasks.requests import encode_form
from tasks.stripe_gateway import StripeGateway
from tests.support.waiting import wait_until
from tests.unit.gateway_calls import (
    AMPLE_S,
    DEADLINE_S,
    INTENT,
    KEY,
    REQUEST,
    WritingClock,
    agree,
    create,
    gateway_to,
    writing_clock,
)
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

__all__ = ["writing_clock"]

ENDS_WITHIN_S = 20.0
"""A call without a deadline would take a minute."""


# --- what is sent ------------------------------------------------------------------------------


def test_a_stored_request_goes_out_to_the_byte_whatever_the_order_of_its_names() -> None:
    shuffled = json.loads('{"metadata": {"a": "ü&=", "b": "2"}, "confirm": true, "amount": 2500}')
    with serving(reply(200, INTENT)) as server:
        create(server.url)
        create(server.url, request=replace(REQUEST, params=shuffled))
    bodies = [request.partition(b"\r\n\r\n")[2] for request in server.requests]
    assert bodies == [b"amount=2500&confirm=true&metadata[a]=%C3%BC%26%3D&metadata[b]=2"] * 2


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


def test_the_digest_of_a_key_tells_keys_apart_and_nothing_more() -> None:
    one, other = (StripeGateway(key, "http://127.0.0.1").key_id for key in (KEY, KEY + "x"))
    assert one != other
    assert one not in KEY
    assert len(one) == 16


# --- nothing reached Stripe --------------------------------------------------------------------


def test_a_refused_connection_is_not_connected() -> None:
    assert create(f"http://127.0.0.1:{free_port()}").kind is ReplyKind.NOT_CONNECTED


def test_an_unknown_host_is_not_connected() -> None:
    assert create("http://stripe.invalid").kind is ReplyKind.NOT_CONNECTED


def test_a_failed_tls_handshake_is_not_connected() -> None:
    with serving(raw(b"not TLS at all\r\n\r\n", close=True)) as server:
        answer = create(server.url.replace("http:", "https:"))
    assert answer.kind is ReplyKind.NOT_CONNECTED
    assert KEY.encode() not in b"".join(server.requests)


def test_a_tls_handshake_that_never_ends_is_over_at_the_deadline() -> None:
    with serving(silence) as server:
        began_s = time.monotonic()
        answer = create(server.url.replace("http:", "https:"), within_s=DEADLINE_S)
    assert answer.kind is ReplyKind.NOT_CONNECTED
    assert time.monotonic() - began_s < ENDS_WITHIN_S


def test_the_last_check_stops_the_call_on_a_standing_connection_before_any_byte() -> None:
    def refuse() -> None:
        raise NotSent("the lease is over")

    with serving(reply(200, INTENT)) as server:
        assert create(server.url, before_write=refuse).kind is ReplyKind.NOT_SENT
        wait_until(lambda: server.connections == 1, 30, "the connection is seen")
    assert server.requests == []


def test_a_call_whose_time_is_over_writes_nothing() -> None:
    with serving(reply(200, INTENT)) as server:
        assert create(server.url, within_s=-0.1).kind is ReplyKind.NOT_CONNECTED
    assert server.requests == []


# --- it may have reached Stripe ----------------------------------------------------------------


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
        pytest.param(dripping(b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 200), id="dripped_head"),
        pytest.param(
            dripping(b"HTTP/1.1 200 OK\r\nContent-Length: 1500\r\n\r\n" + b" " * 1500),
            id="dripped_body",
        ),
        pytest.param(
            dripping(
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 250
            ),
            id="dripped_chunks",
        ),
    ],
)
def test_the_deadline_is_over_the_whole_call(answer: Answer, writing_clock: WritingClock) -> None:
    with serving(answer) as server, gateway_to(server.url) as gateway:
        began_s = time.monotonic()
        seen = gateway.create(REQUEST, DEADLINE_S, writing_clock.begin)
        assert seen.kind is ReplyKind.BROKEN
        assert time.monotonic() - began_s < ENDS_WITHIN_S


# --- kept connections --------------------------------------------------------------------------


def test_a_connection_is_used_again() -> None:
    with serving(reply(200, INTENT)) as server:
        kinds = _twice(server)
    assert kinds == [ReplyKind.ANSWER] * 2
    assert server.connections == 1


def test_a_kept_connection_that_the_server_closed_is_not_written_to() -> None:
    body = json.dumps(INTENT).encode()
    closing = raw(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body, close=True)
    with serving(closing) as server, gateway_to(server.url) as gateway:
        first = gateway.create(REQUEST, boot_clock_s() + AMPLE_S, agree)
        wait_until(lambda: server.ended == 1, 30, "the server has closed the connection")
        second = gateway.create(REQUEST, boot_clock_s() + AMPLE_S, agree)
    assert (first.kind, second.kind) == (ReplyKind.ANSWER, ReplyKind.ANSWER)
    assert server.connections == 2


def test_a_kept_connection_that_breaks_under_the_second_request_is_unknown_and_not_repeated() -> (
    None
):
    with serving(reply(200, INTENT), reset) as server:
        assert _twice(server) == [ReplyKind.ANSWER, ReplyKind.BROKEN]
    assert len(server.requests) == 2


@pytest.mark.parametrize("status", [102, 103])
def test_an_interim_reply_is_no_answer_and_its_final_one_is_not_the_next_calls(
    status: int,
) -> None:
    interim = raw(f"HTTP/1.1 {status} Early\r\nLink: </x>\r\n\r\n".encode())
    with serving(interim, reply(200, {**INTENT, "id": "pi_2"})) as server:
        with gateway_to(server.url) as gateway:
            deadline_s = boot_clock_s() + AMPLE_S
            first = gateway.create(REQUEST, deadline_s, agree)
            second = gateway.create(REQUEST, deadline_s, agree)
        assert (first.kind, second.payment_intent_id) == (ReplyKind.BROKEN, "pi_2")
        assert server.connections == 2


def test_what_is_left_of_a_broken_reply_is_not_read_as_the_next_one(
    writing_clock: WritingClock,
) -> None:
    def late(connection: socket.socket, _: threading.Event) -> None:
        writing_clock.begin(AMPLE_S - DEADLINE_S)
        connection.sendall(OK + b" " * 150)

    with serving(late, reply(200, INTENT)) as server, gateway_to(server.url) as gateway:
        first = gateway.create(REQUEST, AMPLE_S, agree)
        second = gateway.create(REQUEST, writing_clock() + AMPLE_S, agree)
    assert (first.kind, second.kind) == (ReplyKind.BROKEN, ReplyKind.ANSWER)


def _twice(server: ScriptedServer) -> list[ReplyKind]:
    with gateway_to(server.url) as gateway:
        return [gateway.create(REQUEST, boot_clock_s() + AMPLE_S, agree).kind for _ in range(2)]
