"""The gateway to Stripe: what it reads out of a reply, a customer and a list."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from models.ledger import boot_clock_s
from models.outcomes import Reply, ReplyKind
from tasks.errors import StripeUnavailable
from tasks.stripe_gateway import StripeCustomer
from tests.unit.gateway_calls import AMPLE_S, DEADLINE_S, INTENT, KEY, REQUEST, create, gateway_to
from tests.unit.scripted_server import Answer, ScriptedServer, reply, reset, serving, silence

# --- what the reply says -----------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("charge_key", "kind"), [("c1", ReplyKind.ANSWER), ("c2", ReplyKind.BROKEN)]
)
def test_the_answer_to_another_charge_proves_nothing(charge_key: str, kind: ReplyKind) -> None:
    request = replace(REQUEST, params={"amount": 2500, "metadata": {"charge_key": "c1"}})
    intent = {**INTENT, "metadata": {"charge_key": charge_key}}
    declined = {"type": "card_error", "code": "card_declined", "payment_intent": intent}
    for answer in (reply(200, intent), reply(402, {"error": declined})):
        with serving(answer) as server:
            assert create(server.url, request=request).kind is kind


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
    request = replace(REQUEST, endpoint="charges")
    with serving(reply(200, charge)) as server:
        assert create(server.url, request=request).object_status == "requires_capture"


# --- reads -------------------------------------------------------------------------------------


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
    with serving(reply(status, body)) as server, gateway_to(server.url) as gateway:
        assert gateway.customer("cus_1", boot_clock_s() + AMPLE_S) == expected


@pytest.mark.parametrize(
    "answer", [reset, silence, reply(500, {"error": {}}), reply(404, "no"), reply(200, {})]
)
def test_a_customer_that_was_not_read_is_not_a_missing_one(answer: Answer) -> None:
    with (
        serving(answer) as server,
        gateway_to(server.url) as gateway,
        pytest.raises(StripeUnavailable),
    ):
        gateway.customer("cus_1", boot_clock_s() + DEADLINE_S)


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
    with gateway_to(server.url) as gateway:
        return list(
            gateway.list_objects("payment_intents", "cus_1", 1000, boot_clock_s() + AMPLE_S)
        )
