"""What becomes of a PaymentIntent, as Stripe documents it."""

from __future__ import annotations

import pytest

from tests.contract.stripe_simulator.simulator import CHARGES, INTENTS, Simulator, payment


def test_a_good_card_pays_at_once(stripe: Simulator) -> None:
    form = payment(
        payment_method="pm_T1_visa",
        description="Usage",
        **{"metadata[charge_key]": "ck", "metadata[billing_period]": "2026-Q3"},
    )
    intent = stripe.create(form, "k1").json

    assert intent["status"] == "succeeded"
    assert (intent["amount"], intent["amount_received"]) == (2500, 2500)
    assert intent["metadata"] == {"charge_key": "ck", "billing_period": "2026-Q3"}
    assert intent["description"] == "Usage"
    charge = stripe.get(f"{CHARGES}/{intent['latest_charge']}").json
    assert (charge["status"], charge["paid"], charge["captured"]) == ("succeeded", True, True)
    assert (charge["payment_intent"], charge["customer"]) == (intent["id"], "cus_T1")
    (taken,) = stripe.charges()
    assert taken["id"] == charge["id"]
    assert (taken["amount"], taken["currency"], taken["customer"]) == (2500, "usd", "cus_T1")
    assert taken["idempotency_key"] == "k1"
    assert taken["metadata"] == intent["metadata"]
    assert taken["created"] == charge["created"]


@pytest.mark.parametrize(
    ("customer", "code", "decline_code"),
    [
        ("cus_decline_insufficient_funds", "card_declined", "insufficient_funds"),
        ("cus_decline_insufficient_funds_17", "card_declined", "insufficient_funds"),
        ("cus_decline_lost_cardX9", "card_declined", "lost_card"),
        ("cus_decline_generic_decline", "card_declined", "generic_decline"),
        ("cus_decline_expired_card_2", "expired_card", "expired_card"),
        ("cus_decline_brand_new_reason_3", "card_declined", "brand_new_reason"),
        ("cus_decline_", "card_declined", "generic_decline"),
    ],
)
def test_a_customer_declines_as_its_name_says(
    stripe: Simulator, customer: str, code: str, decline_code: str
) -> None:
    default = stripe.get(f"/v1/customers/{customer}").json["invoice_settings"]
    for form in (
        payment(customer),
        payment(customer, payment_method=default["default_payment_method"]),
    ):
        answer = stripe.create(form)
        assert (answer.status, answer.error["type"]) == (402, "card_error")
        assert (answer.error["code"], answer.error["decline_code"]) == (code, decline_code)
    assert stripe.charges() == []


def test_a_decline_leaves_an_open_intent_and_a_failed_charge(stripe: Simulator) -> None:
    error = stripe.create(payment("cus_decline_lost_card")).error

    (intent,) = stripe.listed("cus_decline_lost_card")
    assert intent == error["payment_intent"]
    assert intent["status"] == "requires_payment_method"
    assert intent["last_payment_error"]["decline_code"] == "lost_card"
    (charge,) = stripe.listed("cus_decline_lost_card", CHARGES)
    assert (charge["id"], charge["status"], charge["paid"]) == (error["charge"], "failed", False)
    assert charge["failure_code"] == "card_declined"


@pytest.mark.parametrize(
    ("method", "status", "decline_code"),
    [
        ("pm_card_visa", 200, None),
        ("pm_card_mastercard", 200, None),
        ("card_1abc", 200, None),
        ("src_1abc", 200, None),
        ("pm_card_visa_chargeDeclined", 402, "generic_decline"),
        ("pm_card_chargeDeclined", 402, "generic_decline"),
        ("pm_card_visa_chargeDeclinedInsufficientFunds", 402, "insufficient_funds"),
        ("pm_card_chargeDeclinedLostCard", 402, "lost_card"),
        ("pm_card_visa_chargeDeclinedStolenCard", 402, "stolen_card"),
        ("pm_card_chargeDeclinedExpiredCard", 402, "expired_card"),
        ("pm_card_chargeDeclinedIncorrectCvc", 402, "incorrect_cvc"),
        ("pm_card_chargeDeclinedProcessingError", 402, "processing_error"),
        ("pm_card_visa_chargeDeclinedVelocityLimitExceeded", 402, "card_velocity_exceeded"),
        ("pm_card_chargeCustomerFail", 402, "generic_decline"),
        ("pm_card_authenticationRequired", 402, "authentication_required"),
        ("pm_card_authenticationRequiredOnSetup", 402, "authentication_required"),
    ],
)
def test_the_known_test_cards(
    stripe: Simulator, method: str, status: int, decline_code: str | None
) -> None:
    answer = stripe.create(payment(payment_method=method))

    assert answer.status == status
    if decline_code is not None:
        assert answer.error["decline_code"] == decline_code


@pytest.mark.parametrize("customer", ["cus_decline_lost_card", "cus_auth1", "cus_processing1"])
def test_an_explicit_payment_method_wins_over_the_customer(
    stripe: Simulator, customer: str
) -> None:
    assert (
        stripe.create(payment(customer, payment_method="pm_card_visa")).json["status"]
        == "succeeded"
    )
    declined = stripe.create(payment("cus_T1", payment_method="pm_decline_lost_card"))
    assert declined.error["decline_code"] == "lost_card"


def test_authentication_off_session_is_a_402_with_an_open_intent(stripe: Simulator) -> None:
    answer = stripe.create(payment("cus_auth7"), "k1")

    assert (answer.status, answer.error["code"]) == (402, "authentication_required")
    assert answer.error["decline_code"] == "authentication_required"
    assert answer.error["payment_intent"]["status"] == "requires_payment_method"
    assert stripe.charges() == []

    stripe.complete(answer.error["payment_intent"]["id"])

    (taken,) = stripe.charges()
    assert (taken["customer"], taken["idempotency_key"]) == ("cus_auth7", "k1")
    assert stripe.listed("cus_auth7")[0]["status"] == "succeeded"


def test_authentication_on_session_is_a_200_that_is_not_paid(stripe: Simulator) -> None:
    form = payment("cus_auth7", off_session="false")
    answer = stripe.create(form)

    assert (answer.status, answer.json["status"]) == (200, "requires_action")
    assert stripe.charges() == []
    stripe.complete(answer.json["id"])
    assert len(stripe.charges()) == 1


@pytest.mark.parametrize(
    ("outcome", "status", "taken"),
    [("succeeded", "succeeded", 1), ("failed", "requires_payment_method", 0)],
)
def test_processing_stays_so_until_it_is_settled(
    stripe: Simulator, outcome: str, status: str, taken: int
) -> None:
    intent = stripe.create(payment("cus_processing_3")).json
    assert intent["status"] == "processing"
    assert stripe.charges() == []
    assert stripe.listed("cus_processing_3", CHARGES)[0]["status"] == "pending"

    stripe.settle(intent["id"], outcome)

    after = stripe.get(f"{INTENTS}/{intent['id']}").json
    assert after["status"] == status
    assert (after["last_payment_error"] is None) == (outcome == "succeeded")
    assert len(stripe.charges()) == taken


def test_only_what_is_open_can_be_completed_and_only_processing_settled(
    stripe: Simulator,
) -> None:
    paid = stripe.create().json["id"]

    for action in (stripe.complete, stripe.settle):
        with pytest.raises(OSError, match="status 400"):
            action(paid)
    with pytest.raises(OSError, match="status 404"):
        stripe.complete("pi_nowhere")
    assert len(stripe.charges()) == 1


def test_without_confirm_no_money_moves(stripe: Simulator) -> None:
    form = {"amount": 2500, "currency": "usd", "customer": "cus_nopm"}
    assert stripe.create(form).json["status"] == "requires_payment_method"
    form["payment_method"] = "pm_card_visa"
    assert stripe.create(form).json["status"] == "requires_confirmation"
    assert stripe.charges() == []


def test_manual_capture_is_not_money_taken(stripe: Simulator) -> None:
    assert stripe.create(payment(capture_method="manual")).json["status"] == "requires_capture"
    assert stripe.charges() == []
