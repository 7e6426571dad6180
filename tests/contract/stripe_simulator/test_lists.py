"""Lists and reads of single objects."""

from __future__ import annotations

import math
import time

import pytest

from tests.contract.stripe_simulator.simulator import CHARGES, INTENTS, Simulator, payment


@pytest.mark.parametrize("path", [INTENTS, CHARGES])
def test_a_list_is_consistent_at_once_and_newest_first(stripe: Simulator, path: str) -> None:
    made = [stripe.create(payment(**{"metadata[n]": str(n)})).json for n in range(12)]

    page = stripe.get(path).json
    assert (page["object"], page["url"], page["has_more"]) == ("list", path, True)
    assert [found["metadata"]["n"] for found in page["data"]] == [
        intent["metadata"]["n"] for intent in reversed(made[2:])
    ]


def test_pages_forward_and_backward(stripe: Simulator) -> None:
    ids = [stripe.create().json["id"] for _ in range(7)][::-1]
    stripe.create(payment("cus_other"))

    def page(**more: object) -> tuple[list[str], bool]:
        found = stripe.get(INTENTS, customer="cus_T1", limit=3, **more).json
        return [intent["id"] for intent in found["data"]], found["has_more"]

    assert page() == (ids[:3], True)
    assert page(starting_after=ids[2]) == (ids[3:6], True)
    assert page(starting_after=ids[5]) == (ids[6:], False)
    assert page(ending_before=ids[6]) == (ids[3:6], True)
    assert page(ending_before=ids[3]) == (ids[:3], False)


def test_created_bounds_follow_the_clock(stripe: Simulator) -> None:
    began_s = time.monotonic()
    old = stripe.create().json
    stripe.clock(3600)
    new = stripe.create().json
    took_s = math.ceil(time.monotonic() - began_s)

    def found(**bounds: int) -> list[str]:
        form = {f"created[{name}]": moment for name, moment in bounds.items()}
        page = stripe.call("GET", INTENTS, {"customer": "cus_T1", **form}).json
        return [intent["id"] for intent in page["data"]]

    assert 3600 <= new["created"] - old["created"] <= 3600 + took_s
    assert found(gte=old["created"]) == [new["id"], old["id"]]
    assert found(gt=old["created"]) == [new["id"]]
    assert found(lt=new["created"]) == [old["id"]]
    assert found(gt=old["created"], lte=new["created"]) == [new["id"]]
    assert found(gt=new["created"]) == []


@pytest.mark.parametrize(
    "form",
    [
        {"limit": 0},
        {"limit": 101},
        {"limit": "x"},
        {"starting_after": "pi_nowhere"},
        {"created[gte]": "yesterday"},
        {"metadata[charge_key]": "x"},
    ],
)
def test_a_list_refuses_what_it_does_not_know(stripe: Simulator, form: dict[str, object]) -> None:
    assert stripe.call("GET", INTENTS, form).status == 400


def test_charges_of_one_intent(stripe: Simulator) -> None:
    intent = stripe.create().json
    stripe.create()

    found = stripe.get(CHARGES, payment_intent=intent["id"]).json["data"]
    assert [charge["id"] for charge in found] == [intent["latest_charge"]]


def test_objects_can_be_expanded(stripe: Simulator) -> None:
    intent = stripe.create(payment(**{"expand[]": "latest_charge"})).json
    assert intent["latest_charge"]["object"] == "charge"
    again = stripe.call("GET", f"{INTENTS}/{intent['id']}", {"expand[0]": "customer"}).json
    assert again["customer"]["object"] == "customer"
    page = stripe.call("GET", INTENTS, {"expand[]": "data.latest_charge"}).json
    assert page["data"][0]["latest_charge"]["paid"] is True


@pytest.mark.parametrize(
    "path", [f"{INTENTS}/pi_x", f"{CHARGES}/ch_x", "/v1/payment_methods/pm_missing", "/v1/nothing"]
)
def test_what_is_not_there_is_a_404(stripe: Simulator, path: str) -> None:
    answer = stripe.call("GET", path)

    assert (answer.status, answer.error["type"]) == (404, "invalid_request_error")
