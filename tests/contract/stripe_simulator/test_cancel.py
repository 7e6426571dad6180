"""Which PaymentIntents can be canceled."""

from __future__ import annotations

import pytest

from tests.contract.stripe_simulator.simulator import INTENTS, Simulator, payment


@pytest.mark.parametrize("customer", ["cus_auth", "cus_decline_lost_card"])
def test_an_open_intent_can_be_canceled_and_then_not_paid(stripe: Simulator, customer: str) -> None:
    intent = stripe.create(payment(customer)).error["payment_intent"]["id"]

    canceled = stripe.call(
        "POST", f"{INTENTS}/{intent}/cancel", {"cancellation_reason": "abandoned"}, key="c1"
    )

    assert canceled.json["status"] == "canceled"
    assert canceled.json["cancellation_reason"] == "abandoned"
    with pytest.raises(OSError, match="status 400"):
        stripe.complete(intent)
    assert stripe.call("POST", f"{INTENTS}/{intent}/cancel").status == 400


@pytest.mark.parametrize("customer", ["cus_T1", "cus_processing"])
def test_a_paid_or_processing_intent_cannot_be_canceled(stripe: Simulator, customer: str) -> None:
    intent = stripe.create(payment(customer)).json

    refused = stripe.call("POST", f"{INTENTS}/{intent['id']}/cancel")

    assert (refused.status, refused.error["code"]) == (400, "payment_intent_unexpected_state")
    assert refused.error["payment_intent"]["status"] == intent["status"]
    assert stripe.get(f"{INTENTS}/{intent['id']}").json == intent
