"""Which requests a fault is for, how often, and how faults are listed and cleared."""

from __future__ import annotations

import pytest
import urllib3

from tests.contract.stripe_simulator.simulator import (
    CHARGES,
    FAULT_STATUS,
    INTENTS,
    SHORT_S,
    Simulator,
    payment,
)


def test_a_fault_is_used_as_often_as_it_says_and_replays_count(stripe: Simulator) -> None:
    stripe.fault("http_429", stage="after_commit", times=3)

    statuses = [stripe.create(payment(), "k1").status for _ in range(4)]

    assert statuses == [429, 429, 429, 200]
    assert len(stripe.charges()) == 1


def test_a_replay_spoiled_by_a_500_keeps_its_saved_answer(stripe: Simulator) -> None:
    first = stripe.create(payment(), "k1")
    stripe.fault("http_500", stage="after_commit")

    assert stripe.create(payment(), "k1").status == 500
    assert stripe.create(payment(), "k1").text == first.text


def test_the_first_fault_with_times_left_wins(stripe: Simulator) -> None:
    stripe.fault("http_500", times=1)
    stripe.fault("http_429", times=2)
    stripe.fault("html_502", times=1)

    assert [stripe.create().status for _ in range(5)] == [500, 429, 429, 502, 200]


def test_an_empty_match_is_every_create_and_nothing_else(stripe: Simulator) -> None:
    intent = stripe.create(payment("cus_auth")).error["payment_intent"]["id"]
    stripe.fault("http_500", times=2)

    assert stripe.get("/v1/customers/cus_T1").status == 200
    assert stripe.get(INTENTS, customer="cus_T1").status == 200
    assert stripe.call("POST", "/v1/customers").status == 200
    assert stripe.call("POST", f"{INTENTS}/{intent}/cancel").status == 200
    assert stripe.create().status == 500
    charge = {"amount": 2500, "currency": "usd", "customer": "cus_T1"}
    assert stripe.call("POST", CHARGES, charge).status == 500


def test_a_match_by_customer_leaves_reads_of_that_customer_alone(stripe: Simulator) -> None:
    stripe.fault("http_500", customer="cus_T1")

    assert stripe.get("/v1/customers/cus_T1").status == 200
    assert stripe.get(INTENTS, customer="cus_T1").status == 200
    assert stripe.create(payment("cus_T2")).status == 200
    assert stripe.create(payment("cus_T1")).status == 500


def test_a_match_by_key_path_or_method(stripe: Simulator) -> None:
    intent = stripe.create(payment("cus_auth")).error["payment_intent"]["id"]
    cancel = f"{INTENTS}/{intent}/cancel"
    stripe.fault("http_500", idempotency_key="k1")
    stripe.fault("http_429", path=CHARGES)
    stripe.fault("lock_timeout", path=cancel)

    assert stripe.create(key="k2").status == 200
    assert stripe.create(key="k1").status == 500
    charge = {"amount": 2500, "currency": "usd", "customer": "cus_T1"}
    assert stripe.call("POST", CHARGES, charge).status == 429
    assert stripe.call("POST", cancel).error["code"] == "lock_timeout"
    assert stripe.call("POST", cancel).status == 200


@pytest.mark.parametrize("kind", list(FAULT_STATUS))
@pytest.mark.parametrize("stage", ["before", "after_claim", "after_commit"])
def test_a_read_fails_when_its_method_is_named(stripe: Simulator, kind: str, stage: str) -> None:
    stripe.fault(kind, stage=stage, method="GET", path=INTENTS)

    assert stripe.create().status == 200
    assert stripe.get("/v1/customers/cus_T1").status == 200
    assert stripe.call("GET", INTENTS, {"customer": "cus_T1"}).status == FAULT_STATUS[kind]
    assert len(stripe.listed()) == 1


def test_a_read_can_be_slow_and_can_be_matched_by_customer(stripe: Simulator) -> None:
    stripe.fault("latency", method="GET", customer="cus_T1", seconds=SHORT_S)

    stripe.get("/v1/customers/cus_T2")
    stripe.get("/v1/customers/cus_T1")
    lines = stripe.requests(method="GET")

    assert [line["status"] for line in lines] == [200, 200]
    assert stripe.get("/_sim/faults").json["data"][0]["left"] == 0


def test_a_request_that_never_reaches_the_stage_does_not_use_up_the_fault(
    stripe: Simulator,
) -> None:
    stripe.fault("http_500", stage="after_commit")

    assert stripe.create(payment(amount="x"), "k1").status == 400
    assert stripe.call("POST", INTENTS, payment(), key="k1", api_key=None).status == 401
    assert stripe.create(payment(), "k1").status == 500


def test_faults_can_be_listed_and_cleared(stripe: Simulator) -> None:
    stripe.fault("latency", stage="after_claim", seconds=2, times=3, customer="cus_T1")

    assert stripe.get("/_sim/faults").json["data"] == [
        {
            "match": {"customer": "cus_T1"},
            "stage": "after_claim",
            "kind": "latency",
            "seconds": 2,
            "times": 3,
            "left": 3,
        }
    ]
    assert stripe.call("DELETE", "/_sim/faults").status == 200
    assert stripe.get("/_sim/faults").json["data"] == []
    assert stripe.create().status == 200


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "explode"},
        {"kind": "reset", "stage": "sometimes"},
        {"kind": "reset", "times": 0},
        {"kind": "reset", "match": {"colour": "red"}},
        {"kind": "latency", "seconds": -1},
        {"kind": "latency", "minutes": 1},
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(
    stripe: Simulator, fault: dict[str, object]
) -> None:
    http = urllib3.HTTPConnectionPool("127.0.0.1", stripe.port, retries=False)

    assert http.request("POST", "/_sim/faults", json=fault).status == 400
    assert stripe.get("/_sim/faults").json["data"] == []
