"""Faults: what each kind at each stage does to the reply, the money and the key."""

from __future__ import annotations

from urllib.parse import urlencode

import pytest
import urllib3

from tests.contract.stripe_simulator.simulator import (
    FAULT_STATUS,
    INTENTS,
    KEY,
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


def create_and_leave(stripe: Simulator, *, after_s: float) -> None:
    """A create under the key "k1" whose client has no patience, and closes its connection."""
    impatient = urllib3.HTTPConnectionPool("127.0.0.1", stripe.port, retries=False, timeout=after_s)
    with pytest.raises(urllib3.exceptions.TimeoutError):
        impatient.request(
            "POST",
            INTENTS,
            body=urlencode(payment()),
            headers={"Authorization": f"Bearer {KEY}", "Idempotency-Key": "k1"},
        )
    impatient.close()


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
    http = urllib3.HTTPConnectionPool("127.0.0.1", stripe.port, retries=False)

    reply = http.request(
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


def test_a_running_create_shows_a_passing_status_and_takes_its_money_later(
    stripe: Simulator,
) -> None:
    stripe.fault("latency", stage="after_claim", seconds=0.6)
    running = stripe.in_background(payment(payment_method="pm_card_visa"), "k1")

    shown = stripe.listed()
    assert [intent["status"] for intent in shown] == ["requires_confirmation"]
    assert stripe.charges() == []
    contended = stripe.call("POST", f"{INTENTS}/{shown[0]['id']}/cancel")
    assert (contended.status, contended.error["code"]) == (429, "lock_timeout")

    assert running.answer().json["id"] == shown[0]["id"]
    assert [intent["status"] for intent in stripe.listed()] == ["succeeded"]
    assert len(stripe.charges()) == 1


def test_late_money_is_taken_although_the_client_has_left(stripe: Simulator) -> None:
    stripe.fault("latency", stage="after_claim", seconds=0.6)

    create_and_leave(stripe, after_s=0.2)

    assert stripe.charges() == []
    wait_until(stripe.charges, 5, "the money is taken")


def test_latency_after_the_commit_delays_the_reply_only(stripe: Simulator) -> None:
    stripe.fault("latency", stage="after_commit", seconds=0.6)
    running = stripe.in_background(payment(), "k1")

    assert len(stripe.charges()) == 1
    assert stripe.create(payment(), "k1").replayed
    assert running.answer().status == 200


def test_latency_before_everything_claims_no_key(stripe: Simulator) -> None:
    stripe.fault("latency", stage="before", seconds=0.6)
    late = stripe.in_background(payment(), "k1")

    overtaking = stripe.create(payment(), "k1")

    assert (overtaking.status, overtaking.replayed) == (200, False)
    assert late.answer().replayed
    assert len(stripe.charges()) == 1


def test_a_timeout_holds_its_key_for_the_given_time_and_leaves_nothing(stripe: Simulator) -> None:
    stripe.fault("timeout", stage="after_claim", seconds=0.6)
    hanging = stripe.in_background(payment(), "k1")

    assert stripe.create(payment(), "k1").status == 409
    with pytest.raises(urllib3.exceptions.ProtocolError):
        hanging.answer()
    assert stripe.listed() == []
    assert stripe.create(payment(), "k1").status == 200
    assert len(stripe.charges()) == 1


def test_a_timeout_of_given_length_holds_its_key_although_the_client_has_left(
    stripe: Simulator,
) -> None:
    stripe.fault("timeout", stage="after_claim", seconds=1.0)

    create_and_leave(stripe, after_s=0.1)

    stays(lambda: stripe.create(payment(), "k1").status == 409, SHORT_S, "the key is in flight")
    wait_until(lambda: stripe.create(payment(), "k1").status == 200, 5, "the key is free")
    assert len(stripe.charges()) == 1


def test_a_timeout_of_no_given_length_ends_when_the_client_leaves(stripe: Simulator) -> None:
    stripe.fault("timeout", stage="after_claim")

    create_and_leave(stripe, after_s=0.3)

    def freed() -> bool:
        return stripe.create(payment(), "k1").status == 200

    wait_until(freed, 5, "the key is free")
    assert len(stripe.charges()) == 1


def test_a_hanging_request_does_not_stop_the_others(stripe: Simulator) -> None:
    stripe.fault("timeout", stage="before", seconds=1.0, customer="cus_hangs")
    hanging = stripe.in_background(payment("cus_hangs"), "k1")

    for number in range(20):
        assert stripe.create(payment(), f"other{number}").status == 200
    assert len(stripe.held()) == 1

    with pytest.raises(urllib3.exceptions.HTTPError):
        hanging.answer()


def test_a_reset_of_the_simulator_leaves_a_running_create_without_money(
    stripe: Simulator,
) -> None:
    stripe.fault("latency", stage="after_claim", seconds=0.5)
    running = stripe.in_background(payment(), "k1")
    stripe.reset()

    with pytest.raises(urllib3.exceptions.HTTPError):
        running.answer()
    stays(lambda: stripe.charges() == [], SHORT_S, "no money")
    assert stripe.listed() == []
