"""Parameters that Stripe takes and those that it refuses."""

from __future__ import annotations

import pytest

from tests.contract.stripe_simulator.simulator import CHARGES, INTENTS, Simulator, payment


@pytest.mark.parametrize(
    ("amount", "currency", "code"),
    [
        (49, "usd", "amount_too_small"),
        (50, "usd", None),
        (29, "gbp", "amount_too_small"),
        (30, "gbp", None),
        (49, "jpy", "amount_too_small"),
        (500, "jpy", None),
        (99_999_999, "usd", None),
        (100_000_000, "usd", "amount_too_large"),
        (1234, "kwd", "invalid_charge_amount"),
        (1230, "kwd", None),
        (0, "usd", "parameter_invalid_integer"),
        (-500, "usd", "parameter_invalid_integer"),
        ("5e2", "usd", "parameter_invalid_integer"),
        ("500.0", "usd", "parameter_invalid_integer"),
        ("9" * 30, "usd", "parameter_invalid_integer"),
    ],
)
def test_amounts(stripe: Simulator, amount: object, currency: str, code: str | None) -> None:
    answer = stripe.create(payment(amount=amount, currency=currency))

    assert answer.status == (200 if code is None else 400)
    if code is not None:
        assert (answer.error["code"], answer.error["param"]) == (code, "amount")
    assert len(stripe.charges()) == (1 if code is None else 0)


def test_a_refused_amount_leaves_no_intent(stripe: Simulator) -> None:
    stripe.create(payment(amount=30))
    stripe.create(payment(payment_method="pm_missing"))

    assert stripe.listed() == []


def test_the_currency_may_be_written_in_capitals_and_must_exist(stripe: Simulator) -> None:
    assert stripe.create(payment(currency="JPY")).json["currency"] == "jpy"
    refused = stripe.create(payment(currency="zzz"))
    assert (refused.status, refused.error["param"]) == (400, "currency")


@pytest.mark.parametrize("missing", ["amount", "currency"])
def test_a_required_parameter(stripe: Simulator, missing: str) -> None:
    form = payment()
    del form[missing]
    error = stripe.create(form).error

    assert (error["code"], error["param"]) == ("parameter_missing", missing)


@pytest.mark.parametrize("path", [INTENTS, CHARGES])
def test_an_unknown_parameter(stripe: Simulator, path: str) -> None:
    form = {"amount": 2500, "currency": "usd", "customer": "cus_T1", "idempotency_key": "k"}
    error = stripe.call("POST", path, form).error

    assert (error["code"], error["param"]) == ("parameter_unknown", "idempotency_key")


@pytest.mark.parametrize(
    ("metadata", "status"),
    [
        ({"n" * 40: "v" * 500}, 200),
        ({"n" * 41: "v"}, 400),
        ({"n": "v" * 501}, 400),
        ({f"n{i}": "v" for i in range(50)}, 200),
        ({f"n{i}": "v" for i in range(51)}, 400),
        ({"ключ": "значение ✓ 😀"}, 200),
    ],
)
def test_metadata_limits(stripe: Simulator, metadata: dict[str, str], status: int) -> None:
    form = payment(**{f"metadata[{name}]": value for name, value in metadata.items()})
    answer = stripe.create(form)

    assert answer.status == status
    if status == 200:
        assert answer.json["metadata"] == metadata
        assert stripe.charges()[0]["metadata"] == metadata


@pytest.mark.parametrize(
    ("suffix", "status"),
    [("2026-Q3 usage", 200), ("12345", 400), ("a*b", 400), ("кириллица", 400), ("x" * 23, 400)],
)
def test_the_statement_suffix(stripe: Simulator, suffix: str, status: int) -> None:
    assert stripe.create(payment(statement_descriptor_suffix=suffix)).status == status


def test_cards_take_no_whole_statement_descriptor(stripe: Simulator) -> None:
    assert stripe.create(payment(statement_descriptor="ACME")).status == 400


def test_off_session_goes_with_confirm_only(stripe: Simulator) -> None:
    form = payment(confirm="false")
    assert stripe.create(form).error["param"] == "off_session"


def test_a_body_that_is_not_utf8_is_refused(stripe: Simulator) -> None:
    answer = stripe.call("POST", INTENTS, {"amount": b"\xff\xfe", "currency": "usd"})

    assert answer.status == 400
