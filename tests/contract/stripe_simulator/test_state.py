"""The state file, the request log and the process itself."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
import urllib3

from tests.contract.stripe_simulator.simulator import (
    HELD_S,
    INTENTS,
    REPLY_WITHIN_S,
    Simulator,
    payment,
    running_simulator,
)
from tests.support.waiting import wait_until


@pytest.fixture
def stripe(tmp_path: Path) -> Iterator[Simulator]:
    with running_simulator(tmp_path) as simulator:
        yield simulator


def test_a_kill_loses_nothing_that_was_answered(stripe: Simulator) -> None:
    answers = [stripe.create(payment(f"cus_{n}"), f"k{n}") for n in range(30)]
    declined = stripe.create(payment("cus_decline_lost_card"), "declined")
    stripe.call("POST", "/v1/customers/cus_1", {"default_source": "card_other"})
    stripe.fault("http_429", times=3)
    stripe.create(key="limited")
    stripe.clock(1000)
    before = (stripe.charges(), stripe.requests(), stripe.get("/_sim/faults").json)

    stripe.kill()
    stripe.start()

    assert (stripe.charges(), stripe.requests(), stripe.get("/_sim/faults").json) == before
    assert stripe.get("/_sim/clock").json["offset_s"] == 1000
    stripe.call("DELETE", "/_sim/faults")
    for number, answer in enumerate(answers):
        again = stripe.create(payment(f"cus_{number}"), f"k{number}")
        assert (again.replayed, again.text) == (True, answer.text)
    assert stripe.create(payment("cus_decline_lost_card"), "declined").text == declined.text
    assert stripe.get("/v1/customers/cus_1").json["default_source"] == "card_other"
    assert len(stripe.charges()) == 30


def test_a_kill_frees_the_key_in_flight_and_its_intent_is_gone(stripe: Simulator) -> None:
    stripe.fault("latency", stage="after_claim", seconds=HELD_S)
    running = stripe.in_background(payment(), "k1")
    assert len(stripe.listed()) == 1

    stripe.kill()
    with pytest.raises(urllib3.exceptions.HTTPError):
        running.answer()
    stripe.start()

    assert stripe.listed() == []
    assert stripe.charges() == []
    retry = stripe.create(payment(), "k1")
    assert (retry.status, retry.replayed) == (200, False)
    assert len(stripe.charges()) == 1


def test_a_kill_between_commit_and_reply_keeps_the_money_and_the_answer(
    stripe: Simulator,
) -> None:
    stripe.fault("latency", stage="after_commit", seconds=HELD_S)
    running = stripe.in_background(payment(), "k1")

    stripe.kill()
    with pytest.raises(urllib3.exceptions.HTTPError):
        running.answer()
    stripe.start()

    retry = stripe.create(payment(), "k1")
    assert (retry.status, retry.replayed) == (200, True)
    assert len(stripe.charges()) == 1


def test_a_kill_at_any_moment_under_load_keeps_money_and_answers_together(
    stripe: Simulator,
) -> None:
    """Whatever was answered is there; whatever was not is there whole or not at all."""
    for round_number in range(3):
        loads = [Load(stripe, f"r{round_number}-{number}") for number in range(4)]
        enough = 30 + 50 * round_number
        wait_until(
            lambda: sum(len(load.answered) for load in loads) >= enough,  # noqa: B023
            REPLY_WITHIN_S,
            "load",
        )
        stripe.kill()
        for load in loads:
            load.join()
        stripe.start()
        taken = {charge["idempotency_key"] for charge in stripe.charges()}
        for load in loads:
            assert set(load.answered) <= taken
            assert stripe.create(payment(), load.lost).replayed == (load.lost in taken)
    keys = [charge["idempotency_key"] for charge in stripe.charges()]
    assert len(keys) == len(set(keys))


class Load(threading.Thread):
    """Creates one after the other until the connection breaks; `lost` got no reply."""

    def __init__(self, stripe: Simulator, name: str) -> None:
        super().__init__(daemon=True)
        self.stripe, self.prefix = stripe, name
        self.answered: list[str] = []
        self.lost = ""
        self.start()

    def run(self) -> None:
        for number in itertools.count():
            self.lost = f"{self.prefix}-{number}"
            try:
                answer = self.stripe.create(payment(), self.lost)
            except urllib3.exceptions.HTTPError:
                return
            assert answer.status == 200
            self.answered.append(self.lost)


def test_term_ends_it_cleanly_even_while_requests_hang(stripe: Simulator) -> None:
    stripe.fault("timeout", stage="after_claim")
    running = stripe.in_background(payment(), "k1")

    assert stripe.terminate() == 0
    with pytest.raises(urllib3.exceptions.HTTPError):
        running.answer()
    log = stripe.log.read_text()
    assert "simulator, not Stripe" in log
    assert "Traceback" not in log
    assert "Task was destroyed" not in log
    assert not list(stripe.state.parent.glob("state-*")), "the state is one file"


def test_every_request_is_logged_with_what_the_client_got(stripe: Simulator) -> None:
    form = payment(**{"metadata[charge_key]": "ck"})
    stripe.create(form, "k1")
    stripe.create(form, "k1")
    stripe.create(payment("cus_missing"), "k2")
    stripe.call("GET", INTENTS, {"customer": "cus_T1", "limit": 5})
    stripe.call("GET", INTENTS, api_key=None)
    stripe.fault("reset", stage="after_commit")
    with pytest.raises(urllib3.exceptions.HTTPError):
        stripe.create(form, "k3")

    lines = stripe.requests()

    assert [(line["method"], line["status"], line["replayed"]) for line in lines] == [
        ("POST", 200, False),
        ("POST", 200, True),
        ("POST", 400, False),
        ("GET", 200, False),
        ("GET", 401, False),
        ("POST", None, False),
    ]
    assert [line["idempotency_key"] for line in lines] == ["k1", "k1", "k2", None, None, "k3"]
    assert [line["charge_key"] for line in lines] == ["ck", "ck", None, None, None, "ck"]
    assert lines[3]["query"] == "customer=cus_T1&limit=5"
    assert {line["path"] for line in lines} == {INTENTS}
    sent = urlencode(form).encode()
    assert lines[0]["body_sha256"] == hashlib.sha256(sent).hexdigest()
    assert lines[0]["body_sha256"] == lines[1]["body_sha256"] != lines[2]["body_sha256"]
    moments = [line["at"] for line in lines]
    assert moments == sorted(moments)
    assert abs(moments[0] - time.time()) < 60


def test_the_log_and_the_charges_can_be_filtered(stripe: Simulator) -> None:
    for number in range(3):
        stripe.create(payment(**{"metadata[charge_key]": f"ck{number}"}), f"k{number}")

    assert len(stripe.get("/_sim/requests", charge_key="ck1").json["data"]) == 1
    assert len(stripe.get("/_sim/charges", idempotency_key="k2").json["data"]) == 1
    assert stripe.get("/_sim/charges", customer="cus_none").json == {"data": []}


def test_a_reset_forgets_everything(stripe: Simulator) -> None:
    stripe.create(key="k1")
    stripe.call("POST", "/v1/customers/cus_T1", {"default_source": ""})
    stripe.fault("http_500", times=9)
    stripe.clock(5000)
    stripe.reset()

    assert (stripe.charges(), stripe.requests(), stripe.listed()) == ([], [], [])
    assert abs(stripe.get("/_sim/clock").json["now"] - time.time()) < 60
    assert stripe.get("/_sim/faults").json["data"] == []
    assert not stripe.create(key="k1").replayed
    assert stripe.get("/v1/customers/cus_T1").json["default_source"] is not None


@pytest.mark.parametrize("body", ["", "[]", "not json", '{"advance_s": "1"}', '{"advance_s": -1}'])
def test_a_wrong_admin_request_is_refused_with_a_reason(stripe: Simulator, body: str) -> None:
    http = urllib3.HTTPConnectionPool("127.0.0.1", stripe.port, retries=False)
    reply = http.request("POST", "/_sim/clock", body=body.encode())

    assert reply.status == 400
    assert reply.json()["error"]
    assert http.request("GET", "/_sim/nothing").status == 404


def test_ids_do_not_repeat_after_a_restart(stripe: Simulator) -> None:
    ids = {stripe.create().json["id"] for _ in range(20)}
    stripe.kill()
    stripe.start()
    ids |= {stripe.create().json["id"] for _ in range(20)}

    assert len(ids) == 40
    assert [intent["id"] in ids for intent in stripe.listed()] == [True] * 40
