"""What Stripe's idempotency keys save, replay and refuse."""

from __future__ import annotations

import pytest

from tests.contract.stripe_simulator.simulator import (
    CHARGES,
    HELD_S,
    INTENTS,
    Simulator,
    payment,
)

DAY_S = 24 * 3600


@pytest.mark.parametrize("path", [INTENTS, CHARGES])
def test_a_success_is_replayed_and_takes_no_more_money(stripe: Simulator, path: str) -> None:
    form = payment() if path == INTENTS else {"amount": 2500, "currency": "usd", "source": "tok_x"}

    first = stripe.call("POST", path, form, key="k1")
    again = stripe.call("POST", path, form, key="k1")

    assert (first.status, first.replayed) == (200, False)
    assert (again.status, again.replayed) == (200, True)
    assert again.text == first.text
    assert again.headers["original-request"] == first.headers["request-id"]
    assert again.headers["request-id"] != first.headers["request-id"]
    assert [charge["idempotency_key"] for charge in stripe.charges()] == ["k1"]
    assert [line["replayed"] for line in stripe.creates()] == ([False, True])


def test_a_replay_is_the_first_answer_even_when_the_object_has_changed_since(
    stripe: Simulator,
) -> None:
    first = stripe.create(payment("cus_processing_1"), "k1")
    stripe.settle(first.json["id"])

    assert stripe.create(payment("cus_processing_1"), "k1").json["status"] == "processing"
    assert stripe.get(f"{INTENTS}/{first.json['id']}").json["status"] == "succeeded"


def test_a_decline_is_replayed_although_the_card_is_good_by_now(stripe: Simulator) -> None:
    form = payment("cus_decline_insufficient_funds")
    first = stripe.create(form, "k1")
    stripe.call("POST", "/v1/customers/cus_decline_insufficient_funds", {"source": "card_new"})

    again = stripe.create(form, "k1")
    with_another_key = stripe.create(form, "k2")

    assert (again.status, again.replayed, again.text) == (402, True, first.text)
    assert with_another_key.json["status"] == "succeeded"


@pytest.mark.parametrize(
    ("form", "status", "code"),
    [
        (payment("cus_missing"), 400, "resource_missing"),
        (payment(amount=30), 400, "amount_too_small"),
        (payment(amount=100_000_000), 400, "amount_too_large"),
        (payment(payment_method="pm_missing"), 400, "resource_missing"),
        (payment("cus_nopm"), 400, "payment_intent_unexpected_state"),
    ],
)
def test_a_refusal_found_while_executing_is_saved(
    stripe: Simulator, form: dict[str, object], status: int, code: str
) -> None:
    first, again = stripe.create(form, "k1"), stripe.create(form, "k1")

    assert (first.status, first.error["code"], first.replayed) == (status, code, False)
    assert (again.status, again.replayed, again.text) == (status, True, first.text)


def test_a_missing_intent_to_cancel_is_saved(stripe: Simulator) -> None:
    path = f"{INTENTS}/pi_nowhere/cancel"

    assert stripe.call("POST", path, key="k1").status == 404
    assert stripe.call("POST", path, key="k1").replayed


@pytest.mark.parametrize(
    "change",
    [
        {"amount": ""},
        {"amount": "12.5"},
        {"amount": "-1"},
        {"currency": "zzz"},
        {"made_up": "1"},
        {"metadata[x]": "v" * 501},
    ],
)
def test_a_failed_validation_is_not_saved(stripe: Simulator, change: dict[str, str]) -> None:
    refused = stripe.create(payment(**change), "k1")
    assert refused.status == 400
    assert refused.error["type"] == "invalid_request_error"
    assert not stripe.create(payment(**change), "k1").replayed

    corrected = stripe.create(payment(), "k1")

    assert (corrected.status, corrected.replayed) == (200, False)


def test_an_unauthorised_request_is_not_saved(stripe: Simulator) -> None:
    assert stripe.call("POST", INTENTS, payment(), key="k1", api_key=None).status == 401
    assert stripe.call("POST", INTENTS, payment(), key="k1", api_key="sk_test_bad").status == 401

    assert not stripe.create(payment(), "k1").replayed


@pytest.mark.parametrize("kind", ["http_429", "lock_timeout"])
@pytest.mark.parametrize("stage", ["before", "after_claim"])
def test_a_429_is_not_saved(stripe: Simulator, kind: str, stage: str) -> None:
    stripe.fault(kind, stage=stage)

    assert stripe.create(key="k1").status == 429
    assert stripe.charges() == []
    retry = stripe.create(key="k1")

    assert (retry.status, retry.replayed) == (200, False)
    assert len(stripe.charges()) == 1


def test_other_parameters_under_the_same_key_are_refused_and_change_nothing(
    stripe: Simulator,
) -> None:
    first = stripe.create(payment(), "k1")

    for other in (payment(amount=2600), payment(description="x"), payment("cus_T2")):
        clash = stripe.create(other, "k1")
        assert (clash.status, clash.error["type"]) == (400, "idempotency_error")
        assert not clash.replayed
    assert stripe.create(payment(), "k1").text == first.text
    assert len(stripe.charges()) == 1


def test_the_same_key_on_another_endpoint_is_refused(stripe: Simulator) -> None:
    form = {"amount": 2500, "currency": "usd", "customer": "cus_T1"}
    stripe.create(form, "k1")

    assert stripe.call("POST", CHARGES, form, key="k1").error["type"] == "idempotency_error"


def test_the_order_of_parameters_does_not_matter(stripe: Simulator) -> None:
    form = payment(**{"metadata[a]": "1", "metadata[b]": "2"})
    stripe.create(form, "k1")

    assert stripe.create(dict(reversed(form.items())), "k1").replayed


def test_the_key_belongs_to_the_account_not_to_the_secret_key(stripe: Simulator) -> None:
    stripe.create(payment(), "k1")

    assert stripe.call("POST", INTENTS, payment(), key="k1", api_key="rk_test_other").replayed


def test_a_key_in_flight_is_a_conflict_whose_loser_is_not_saved(stripe: Simulator) -> None:
    stripe.fault("latency", stage="after_claim", seconds=HELD_S)
    winner = stripe.in_background(payment(), "k1")

    loser = stripe.create(payment(), "k1")
    clash = stripe.create(payment(amount=999), "k1")

    assert (loser.status, loser.error["code"]) == (409, "idempotency_key_in_use")
    assert loser.error["type"] == "invalid_request_error"
    assert (clash.status, clash.error["type"]) == (400, "idempotency_error")
    stripe.release()
    assert winner.answer().json["status"] == "succeeded"
    replay = stripe.create(payment(), "k1")
    assert (replay.status, replay.text) == (200, winner.answer().text)
    assert replay.replayed
    assert len(stripe.charges()) == 1


def test_a_500_after_execution_began_is_replayed_for_ever(stripe: Simulator) -> None:
    stripe.fault("http_500", stage="after_claim")

    first = stripe.create(key="k1")
    again = [stripe.create(key="k1") for _ in range(3)]

    assert (first.status, first.error["type"], first.replayed) == (500, "api_error", False)
    assert [(a.status, a.replayed, a.text) for a in again] == [(500, True, first.text)] * 3
    assert stripe.charges() == []
    assert stripe.listed() == []


def test_a_500_ahead_of_execution_is_not_saved(stripe: Simulator) -> None:
    stripe.fault("http_500", stage="before")

    assert stripe.create(key="k1").status == 500
    retry = stripe.create(key="k1")

    assert (retry.status, retry.replayed) == (200, False)


def test_a_key_is_forgotten_when_it_is_a_day_old_and_not_earlier(stripe: Simulator) -> None:
    stripe.create(key="k1")
    stripe.clock(DAY_S - 60)
    assert stripe.create(key="k1").replayed

    stripe.clock(61)
    second = stripe.create(key="k1")

    assert (second.status, second.replayed) == (200, False)
    assert [charge["idempotency_key"] for charge in stripe.charges()] == ["k1", "k1"]
    assert stripe.create(key="k1").text == second.text


def test_a_replay_does_not_renew_the_key(stripe: Simulator) -> None:
    stripe.create(key="k1")
    for _ in range(3):
        stripe.clock(DAY_S / 4)
        assert stripe.create(key="k1").replayed
    stripe.clock(DAY_S / 4 + 1)

    assert not stripe.create(key="k1").replayed


def test_a_key_has_at_most_255_characters(stripe: Simulator) -> None:
    assert stripe.create(key="k" * 255).status == 200
    assert stripe.create(key="k" * 256).status == 400
    assert len(stripe.charges()) == 1


def test_a_key_on_a_get_means_nothing(stripe: Simulator) -> None:
    for _ in range(2):
        read = stripe.call("GET", "/v1/customers/cus_T1", key="k1")
        assert (read.status, read.replayed) == (200, False)
        assert "idempotency-key" not in read.headers

    assert not stripe.create(key="k1").replayed


def test_without_a_key_every_create_is_a_new_one(stripe: Simulator) -> None:
    stripe.create()
    stripe.create()

    assert len(stripe.charges()) == 2


def test_the_key_comes_back_in_the_reply(stripe: Simulator) -> None:
    assert stripe.create(key="k1").headers["idempotency-key"] == "k1"
    assert stripe.create(payment("cus_missing"), "k2").headers["idempotency-key"] == "k2"
