"""The simulator through stripe-python, the client that production uses."""

from __future__ import annotations

from typing import Any

import pytest
import stripe as sdk

from tests.contract.stripe_simulator.simulator import Simulator


@pytest.fixture
def client(stripe: Simulator) -> sdk.StripeClient:
    return client_with(stripe, "sk_test_sdk")


def client_with(stripe: Simulator, api_key: str) -> sdk.StripeClient:
    return sdk.StripeClient(
        api_key,
        base_addresses={"api": stripe.base_url},
        http_client=sdk.RequestsClient(timeout=10),
    )


def params(customer: str = "cus_T1", **more: Any) -> Any:
    return {
        "amount": 2500,
        "currency": "usd",
        "customer": customer,
        "payment_method": "pm_card_visa",
        "confirm": True,
        "off_session": True,
        "metadata": {"charge_key": "ck", "billing_period": "a:b [c]&d=é"},
        **more,
    }


def create(client: sdk.StripeClient, form: Any, key: str = "k1") -> sdk.PaymentIntent:
    return client.v1.payment_intents.create(form, {"idempotency_key": key})


def test_a_payment_and_its_replay(stripe: Simulator, client: sdk.StripeClient) -> None:
    first = create(client, params(expand=["latest_charge"]))
    again = create(client, params(expand=["latest_charge"]))

    assert (first.status, again.id) == ("succeeded", first.id)
    assert again.last_response is not None
    assert again.last_response.headers["Idempotent-Replayed"] == "true"
    (taken,) = stripe.charges()
    assert taken["metadata"] == {"charge_key": "ck", "billing_period": "a:b [c]&d=é"}


def test_a_decline_brings_its_codes_and_its_intent(client: sdk.StripeClient) -> None:
    customer = client.v1.customers.retrieve("cus_decline_insufficient_funds_4")
    assert customer.invoice_settings is not None
    method = customer.invoice_settings.default_payment_method

    with pytest.raises(sdk.CardError) as declined:
        create(client, params(customer.id, payment_method=method))

    error = declined.value
    assert (error.http_status, error.code) == (402, "card_declined")
    assert error.error is not None
    assert error.error.decline_code == "insufficient_funds"
    assert error.error.payment_intent is not None
    assert error.error.payment_intent.status == "requires_payment_method"


def test_authentication(client: sdk.StripeClient) -> None:
    with pytest.raises(sdk.CardError) as refused:
        create(client, params(payment_method="pm_card_authenticationRequired"))

    assert refused.value.code == "authentication_required"


@pytest.mark.parametrize(
    ("form", "code"),
    [
        (params("cus_missing"), "resource_missing"),
        (params(amount=10), "amount_too_small"),
        (params(made_up="x"), "parameter_unknown"),
    ],
)
def test_a_refused_request(client: sdk.StripeClient, form: Any, code: str) -> None:
    with pytest.raises(sdk.InvalidRequestError) as refused:
        create(client, form)

    assert refused.value.code == code


def test_other_parameters_are_an_idempotency_error(client: sdk.StripeClient) -> None:
    create(client, params())

    with pytest.raises(sdk.IdempotencyError):
        create(client, params(amount=2600))


@pytest.mark.parametrize(
    ("api_key", "error"),
    [("sk_test_bad", sdk.AuthenticationError), ("sk_test_forbidden", sdk.PermissionError)],
)
def test_wrong_keys(stripe: Simulator, api_key: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        create(client_with(stripe, api_key), params())


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("http_429", sdk.RateLimitError),
        ("lock_timeout", sdk.RateLimitError),
        ("http_500", sdk.APIError),
        ("html_502", sdk.APIError),
        ("reset", sdk.APIConnectionError),
        ("truncate", sdk.APIConnectionError),
        ("timeout", sdk.APIConnectionError),
    ],
)
def test_how_each_fault_looks_to_the_client(
    stripe: Simulator, client: sdk.StripeClient, kind: str, error: type[Exception]
) -> None:
    stripe.fault(kind, stage="after_commit", seconds=0.2)

    with pytest.raises(error):
        create(client, params())
    assert len(stripe.charges()) == 1
    assert len(stripe.creates()) == 1, "the client did not retry by itself"


def test_paging_to_the_end(stripe: Simulator, client: sdk.StripeClient) -> None:
    made = [create(client, params(), f"k{n}").id for n in range(23)]
    listing: Any = {"customer": "cus_T1", "limit": 10, "created": {"gte": 1}}

    found = [i.id for i in client.v1.payment_intents.list(listing).auto_paging_iter()]

    assert found == made[::-1]
    assert len(stripe.requests(method="GET")) == 3


def test_cancel_charges_and_the_account(client: sdk.StripeClient) -> None:
    open_intent = create(client, params(off_session=False, payment_method="pm_auth"))
    assert open_intent.status == "requires_action"
    assert client.v1.payment_intents.cancel(open_intent.id).status == "canceled"

    charge = client.v1.charges.create({"amount": 500, "currency": "jpy", "customer": "cus_T1"})
    assert client.v1.charges.retrieve(charge.id).paid
    assert client.v1.accounts.retrieve_current().id == "acct_simulator"


def test_a_customer_made_by_the_client(client: sdk.StripeClient) -> None:
    made = client.v1.customers.create(
        {"invoice_settings": {"default_payment_method": "pm_card_visa"}, "metadata": {"a": "1"}}
    )
    methods = client.v1.customers.payment_methods.list(made.id)

    assert [method.id for method in methods.data] == ["pm_card_visa"]
    assert client.v1.payment_methods.retrieve("pm_card_visa").type == "card"
