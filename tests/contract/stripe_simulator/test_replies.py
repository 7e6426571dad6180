"""Who may ask, and what every reply brings."""

from __future__ import annotations

import base64

import pytest

from tests.contract.stripe_simulator.simulator import INTENTS, KEY, Simulator, payment


@pytest.mark.parametrize(
    ("api_key", "status"),
    [
        (None, 401),
        ("sk_live_x", 401),
        ("nonsense", 401),
        ("sk_test_bad_key", 401),
        ("sk_test_forbidden", 403),
        ("sk_test_x", 200),
        ("rk_test_x", 200),
    ],
)
def test_any_test_key_will_do_but_a_key_there_must_be(
    stripe: Simulator, api_key: str | None, status: int
) -> None:
    answer = stripe.call("POST", INTENTS, payment(), api_key=api_key)

    assert answer.status == status
    assert len(stripe.charges()) == (1 if status == 200 else 0)


def test_basic_authorization_works_as_with_curl(stripe: Simulator) -> None:
    basic = base64.b64encode(f"{KEY}:".encode()).decode()

    answer = stripe.call("GET", "/v1/account", api_key=None, headers={"Authorization": basic})
    assert answer.status == 401
    sent = {"Authorization": f"Basic {basic}"}
    assert stripe.call("GET", "/v1/account", api_key=None, headers=sent).status == 200


def test_every_reply_says_that_it_comes_from_a_simulator(stripe: Simulator) -> None:
    answers = [
        stripe.create(),
        stripe.create(payment("cus_missing")),
        stripe.call("GET", "/v1/nothing"),
        stripe.call("GET", "/v1/account", api_key=None),
    ]

    for answer in answers:
        assert answer.headers["x-stripe-simulator"] == "chargebridge"
        assert answer.headers["request-id"].startswith("req_")
    assert [answer.status for answer in answers] == [200, 400, 404, 401]
    assert stripe.get("/_sim/health").headers["x-stripe-simulator"] == "chargebridge"


def test_the_version_asked_for_comes_back(stripe: Simulator) -> None:
    answer = stripe.call("GET", "/v1/account", headers={"Stripe-Version": "2024-01-01"})

    assert answer.headers["stripe-version"] == "2024-01-01"
    assert answer.json["id"] == "acct_simulator"
