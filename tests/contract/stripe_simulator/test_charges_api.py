"""The Charges API: creates, and what a charge shows later."""

from __future__ import annotations

import pytest

from tests.contract.stripe_simulator.simulator import CHARGES, INTENTS, Simulator


def test_a_charge_takes_money_from_the_source_or_the_default_source(stripe: Simulator) -> None:
    form = {"amount": 700, "currency": "eur", "customer": "cus_T1", "metadata[charge_key]": "ck"}
    charge = stripe.call("POST", CHARGES, form, key="k1").json

    assert (charge["object"], charge["status"], charge["paid"]) == ("charge", "succeeded", True)
    assert charge["payment_intent"] is None
    (taken,) = stripe.charges()
    assert (taken["id"], taken["idempotency_key"]) == (charge["id"], "k1")
    assert stripe.listed(path=CHARGES) == [charge]
    assert stripe.listed(path=INTENTS) == []
    declined = stripe.call("POST", CHARGES, {**form, "source": "tok_chargeDeclined"})
    assert declined.status == 402


@pytest.mark.parametrize(
    ("customer", "code"),
    [
        ("cus_decline_lost_card", "card_declined"),
        ("cus_auth", "authentication_required"),
        ("cus_nopm", "missing"),
    ],
)
def test_a_failed_charge(stripe: Simulator, customer: str, code: str) -> None:
    form = {"amount": 700, "currency": "eur", "customer": customer}
    answer = stripe.call("POST", CHARGES, form)

    assert (answer.status, answer.error["type"]) == (402, "card_error")
    assert answer.error["code"] == code
    assert "payment_intent" not in answer.error
    failed = stripe.listed(customer, CHARGES)
    assert [charge["status"] for charge in failed] == ([] if code == "missing" else ["failed"])
    assert stripe.charges() == []


def test_a_pending_charge_is_settled_later(stripe: Simulator) -> None:
    form = {"amount": 700, "currency": "eur", "customer": "cus_processing"}
    charge = stripe.call("POST", CHARGES, form).json
    assert charge["status"] == "pending"
    stripe.settle(charge["id"])

    assert len(stripe.charges()) == 1


def test_refunds_and_disputes_show_in_the_charge(stripe: Simulator) -> None:
    intent = stripe.create().json
    for action, body in (("refund", {"amount": 1000}), ("refund", {}), ("dispute", {})):
        stripe._post(action, {"id": intent["id"], **body})

    charge = stripe.get(f"{CHARGES}/{intent['latest_charge']}").json
    assert (charge["amount_refunded"], charge["refunded"], charge["disputed"]) == (2500, True, True)
    assert len(stripe.charges()) == 1
