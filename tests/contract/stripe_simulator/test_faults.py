"""Faults: what each kind at each stage does to the reply, the money and the key."""

from __future__ import annotations

import http.client
import time
from urllib.parse import urlencode

import pytest
import urllib3

from tests.contract.stripe_simulator.simulator import (
    FAULT_STATUS,
    HELD_S,
    INTENTS,
    KEY,
    REPLY_WITHIN_S,
    SHORT_S,
    Answer,
    Simulator,
    payment,
)
from tests.support.waiting import stays, wait_until

NO_REPLY = ("reset", "timeout", "truncate")


def outcome(stripe: Simulator, key: str = "k1") -> Answer | None:
    """The reply to a create, None when there was no whole one."""
    try:
        return stripe.create(payment(), key)
    except urllib3.exceptions.HTTPError:
        return None


def create_and_leave(stripe: Simulator) -> None:
    """A create under the key "k1" whose client closes its connection when it is held."""
    link = http.client.HTTPConnection("127.0.0.1", stripe.port, timeout=REPLY_WITHIN_S)
    sent = {"Authorization": f"Bearer {KEY}", "Idempotency-Key": "k1"}
    link.request("POST", INTENTS, urlencode(payment()), sent)
    wait_until(stripe.held, REPLY_WITHIN_S, "the create is held")
    link.close()


@pytest.mark.parametrize("kind", [*FAULT_STATUS, *NO_REPLY])
@pytest.mark.parametrize("stage", ["before", "after_claim", "after_commit"])
def test_the_client_sees_the_fault_once_and_the_stage_decides_about_the_money(
    stripe: Simulator, kind: str, stage: str
) -> None:
    stripe.fault(kind, stage=stage, seconds=SHORT_S)

    spoiled = outcome(stripe)

    assert (None if spoiled is None else spoiled.status) == FAULT_STATUS.get(kind)
    assert len(stripe.charges()) == (1 if stage == "after_commit" else 0)
    assert stripe.creates()[0]["status"] == (200 if kind == "truncate" else FAULT_STATUS.get(kind))
    retry = stripe.create(payment(), "k1")
    saved_500 = kind == "http_500" and stage != "before"
    assert retry.status == (500 if saved_500 else 200)
    assert retry.replayed == (saved_500 or stage == "after_commit")
    assert len(stripe.charges()) == (0 if saved_500 and stage == "after_claim" else 1)


def test_a_500_at_the_commit_keeps_the_money_and_hides_it_behind_the_saved_answer(
    stripe: Simulator,
) -> None:
    stripe.fault("http_500", stage="after_commit")

    assert outcome(stripe).status == 500  # type: ignore[union-attr]
    assert stripe.create(payment(), "k1").status == 500
    assert [intent["status"] for intent in stripe.listed()] == ["succeeded"]
    assert len(stripe.charges()) == 1


def test_a_spoiled_decline_is_still_the_saved_answer(stripe: Simulator) -> None:
    stripe.fault("html_502", stage="after_commit")
    form = payment("cus_decline_lost_card")

    assert stripe.create(form, "k1").status == 502
    replay = stripe.create(form, "k1")

    assert (replay.status, replay.replayed) == (402, True)
    assert replay.error["decline_code"] == "lost_card"


def test_the_limiter_names_its_reason_and_contention_its_code(stripe: Simulator) -> None:
    stripe.fault("http_429")
    limited = stripe.create()
    stripe.fault("lock_timeout")
    contended = stripe.create()

    assert limited.error["code"] == "rate_limit"
    assert limited.headers["stripe-rate-limited-reason"] == "global-rate"
    assert contended.error["code"] == "lock_timeout"
    assert "stripe-rate-limited-reason" not in contended.headers


def test_a_502_is_a_page_and_not_json(stripe: Simulator) -> None:
    stripe.fault("html_502")
    page = stripe.create()

    assert page.headers["content-type"].startswith("text/html")
    assert page.text.startswith("<html>")


def test_a_truncated_reply_announces_the_whole_body_and_brings_half(stripe: Simulator) -> None:
    stripe.fault("truncate", stage="after_commit")
    pool = urllib3.HTTPConnectionPool("127.0.0.1", stripe.port, retries=False)

    reply = pool.request(
        "POST",
        INTENTS,
        body="amount=2500&currency=usd&customer=cus_T1&confirm=true",
        headers={"Authorization": "Bearer sk_test_x"},
        preload_content=False,
    )
    announced = int(reply.headers["Content-Length"])

    with pytest.raises(urllib3.exceptions.ProtocolError) as error:
        reply.read()
    assert f"IncompleteRead({announced // 2} bytes read" in str(error.value)


def test_a_reset_is_a_reset_and_not_a_close(stripe: Simulator) -> None:
    stripe.fault("reset")

    with pytest.raises(urllib3.exceptions.ProtocolError) as error:
        stripe.create()
    # RemoteDisconnected, a plain close, is a subclass.
    assert type(error.value.args[1]) is ConnectionResetError


@pytest.mark.parametrize("kind", ["latency", "timeout"])
@pytest.mark.parametrize("stage", ["before", "after_claim", "after_commit"])
def test_a_delay_is_as_long_as_it_says(stripe: Simulator, kind: str, stage: str) -> None:
    stripe.fault(kind, stage=stage, seconds=SHORT_S)
    began_s = time.monotonic()

    assert (outcome(stripe) is None) == (kind == "timeout")
    assert time.monotonic() - began_s >= SHORT_S


@pytest.mark.parametrize("stage", ["before", "after_claim", "after_commit"])
def test_what_is_held_can_be_let_go_and_what_comes_later_is_held_again(
    stripe: Simulator, stage: str
) -> None:
    stripe.fault("latency", stage=stage, seconds=HELD_S, times=2)
    first = stripe.in_background(payment(), "k1")
    stripe.release()
    assert first.answer().status == 200

    second = stripe.in_background(payment(), "k1" if stage == "after_commit" else "k2")
    stays(stripe.held, SHORT_S, "the second one is held")
    stripe.release()
    assert second.answer().status == 200


def test_a_running_create_shows_a_passing_status_and_takes_its_money_later(
    stripe: Simulator,
) -> None:
    stripe.fault("latency", stage="after_claim", seconds=HELD_S)
    running = stripe.in_background(payment(payment_method="pm_card_visa"), "k1")

    shown = stripe.listed()
    assert [intent["status"] for intent in shown] == ["requires_confirmation"]
    assert stripe.charges() == []
    contended = stripe.call("POST", f"{INTENTS}/{shown[0]['id']}/cancel")
    assert (contended.status, contended.error["code"]) == (429, "lock_timeout")

    stripe.release()
    assert running.answer().json["id"] == shown[0]["id"]
    assert [intent["status"] for intent in stripe.listed()] == ["succeeded"]
    assert len(stripe.charges()) == 1


def test_late_money_is_taken_although_the_client_has_left(stripe: Simulator) -> None:
    stripe.fault("latency", stage="after_claim", seconds=HELD_S)

    create_and_leave(stripe)

    assert stripe.charges() == []
    stripe.release()
    wait_until(stripe.charges, REPLY_WITHIN_S, "the money is taken")


def test_latency_after_the_commit_delays_the_reply_only(stripe: Simulator) -> None:
    stripe.fault("latency", stage="after_commit", seconds=HELD_S)
    running = stripe.in_background(payment(), "k1")

    assert len(stripe.charges()) == 1
    assert stripe.create(payment(), "k1").replayed
    stripe.release()
    assert running.answer().status == 200


def test_latency_before_everything_claims_no_key(stripe: Simulator) -> None:
    stripe.fault("latency", stage="before", seconds=HELD_S)
    late = stripe.in_background(payment(), "k1")

    overtaking = stripe.create(payment(), "k1")

    assert (overtaking.status, overtaking.replayed) == (200, False)
    stripe.release()
    assert late.answer().replayed
    assert len(stripe.charges()) == 1


def test_a_timeout_holds_its_key_as_long_as_it_lasts_and_leaves_nothing(
    stripe: Simulator,
) -> None:
    stripe.fault("timeout", stage="after_claim", seconds=HELD_S)
    hanging = stripe.in_background(payment(), "k1")

    assert stripe.create(payment(), "k1").status == 409
    stripe.release()
    with pytest.raises(urllib3.exceptions.ProtocolError):
        hanging.answer()
    assert stripe.listed() == []
    assert stripe.create(payment(), "k1").status == 200
    assert len(stripe.charges()) == 1


def test_a_timeout_of_given_length_holds_its_key_although_the_client_has_left(
    stripe: Simulator,
) -> None:
    stripe.fault("timeout", stage="after_claim", seconds=HELD_S)

    create_and_leave(stripe)

    def status() -> int:
        return stripe.create(payment(), "k1").status

    stays(lambda: status() == 409, SHORT_S, "the key is in flight")
    stripe.release()
    wait_until(lambda: status() == 200, REPLY_WITHIN_S, "the key is free")
    assert len(stripe.charges()) == 1


def test_a_timeout_of_no_given_length_ends_when_the_client_leaves(stripe: Simulator) -> None:
    stripe.fault("timeout", stage="after_claim")

    create_and_leave(stripe)

    def freed() -> bool:
        return stripe.create(payment(), "k1").status == 200

    wait_until(freed, REPLY_WITHIN_S, "the key is free")
    assert len(stripe.charges()) == 1


def test_a_hanging_request_does_not_stop_the_others(stripe: Simulator) -> None:
    stripe.fault("timeout", stage="before", seconds=HELD_S, customer="cus_hangs")
    hanging = stripe.in_background(payment("cus_hangs"), "k1")

    for number in range(20):
        assert stripe.create(payment(), f"other{number}").status == 200
    assert len(stripe.held()) == 1

    stripe.release()
    with pytest.raises(urllib3.exceptions.ProtocolError):
        hanging.answer()


def test_a_reset_of_the_simulator_leaves_a_running_create_without_money(
    stripe: Simulator,
) -> None:
    stripe.fault("latency", stage="after_claim", seconds=HELD_S)
    running = stripe.in_background(payment(), "k1")
    stripe.reset()
    stripe.release()

    with pytest.raises(urllib3.exceptions.ProtocolError):
        running.answer()
    stays(lambda: stripe.charges() == [], SHORT_S, "no money")
    assert stripe.listed() == []
