"""Customers and their payment methods."""

from __future__ import annotations

import pytest

from tests.contract.stripe_simulator.simulator import INTENTS, Simulator, payment


def test_any_customer_exists_with_a_good_card(stripe: Simulator) -> None:
    customer = stripe.get("/v1/customers/cus_Anybody_1").json

    method = customer["invoice_settings"]["default_payment_method"]
    assert method.startswith("pm_")
    listed = stripe.get("/v1/customers/cus_Anybody_1/payment_methods").json["data"]
    assert [found["id"] for found in listed] == [method]
    assert stripe.get(f"/v1/payment_methods/{method}").json["type"] == "card"
    assert stripe.create(payment("cus_Anybody_1", payment_method=method)).status == 200
    assert stripe.create(payment("cus_Anybody_1")).status == 200


@pytest.mark.parametrize("customer", ["cus_missing", "cus_missing_2", "nobody"])
def test_a_missing_customer_is_missing_everywhere(stripe: Simulator, customer: str) -> None:
    read = stripe.call("GET", f"/v1/customers/{customer}")
    create = stripe.create(payment(customer, payment_method="pm_card_visa"))
    listing = stripe.call("GET", INTENTS, {"customer": customer})

    assert [a.status for a in (read, create, listing)] == [404, 400, 400]
    for answer in (read, create, listing):
        assert answer.error["type"] == "invalid_request_error"
        assert answer.error["code"] == "resource_missing"
    assert create.error["param"] == "customer"
    assert stripe.charges() == []


def test_a_customer_without_a_payment_method(stripe: Simulator) -> None:
    customer = stripe.get("/v1/customers/cus_nopm").json
    assert customer["invoice_settings"]["default_payment_method"] is None
    assert customer["default_source"] is None
    assert stripe.get("/v1/customers/cus_nopm/payment_methods").json["data"] == []

    refused = stripe.create(payment("cus_nopm"))
    assert refused.error["code"] == "payment_intent_unexpected_state"
    assert stripe.create(payment("cus_nopm", payment_method="pm_card_visa")).status == 200


def test_only_the_default_source_stands_in_for_a_payment_method(stripe: Simulator) -> None:
    for_invoices = stripe.call(
        "POST", "/v1/customers", {"invoice_settings[default_payment_method]": "pm_card_visa"}
    ).json
    assert for_invoices["default_source"] is None
    by_source = stripe.call("POST", "/v1/customers", {"source": "card_1"}).json
    assert by_source["invoice_settings"]["default_payment_method"] is None

    assert stripe.create(payment(for_invoices["id"])).status == 400
    assert stripe.create(payment(by_source["id"])).json["payment_method"] == "card_1"


def test_a_customers_card_can_be_changed(stripe: Simulator) -> None:
    path = "/v1/customers/cus_decline_lost_card"
    changed = stripe.call("POST", path, {"invoice_settings[default_payment_method]": "pm_card_x"})

    assert changed.status == 200
    method = stripe.get(path).json["invoice_settings"]["default_payment_method"]
    assert method == "pm_card_x"
    assert stripe.create(payment("cus_decline_lost_card", payment_method=method)).status == 200
    refused = stripe.call("POST", path, {"default_source": "card_missing"})
    assert refused.error["code"] == "resource_missing"


def test_a_deleted_customer_cannot_be_charged_but_its_past_can_be_listed(
    stripe: Simulator,
) -> None:
    stripe.create(payment("cus_T9"))
    assert stripe.call("DELETE", "/v1/customers/cus_T9").json["deleted"] is True

    assert stripe.get("/v1/customers/cus_T9").json["deleted"] is True
    assert stripe.create(payment("cus_T9")).error["code"] == "resource_missing"
    assert len(stripe.listed("cus_T9")) == 1
