"""The known ways to charge twice at Stripe itself, one test each (docs/failure-modes.md)."""

from __future__ import annotations

import pytest

from models.states import State
from sandbox import clock
from sandbox.health import http
from sandbox.stack import STRIPE_KEY
from tests.support.pipelines import SHORT_DELIVERIES, SLACK_S, Pipeline, key_of
from tests.support.producers import billing_event
from tests.support.waiting import stays, wait_until

PIPELINE_ENV = SHORT_DELIVERIES
DAY_S = 25 * 3600.0


@pytest.mark.parametrize("broker", ["nsq", "redis"])
def test_s1_after_a_timeout_the_charge_may_exist(pipeline: Pipeline, broker: str) -> None:
    event = billing_event(f"s1_{broker}")
    pipeline.stripe.fault("timeout", stage="after_commit")
    pipeline.publish(broker, event)
    wait_until(lambda: pipeline.charges(event), SLACK_S, "Stripe took the money")
    record = pipeline.record(event)
    assert record is not None
    assert (record.state, pipeline.unfinished()) == (State.SENT, 1)
    pipeline.charged_once(event, within_s=2 * pipeline.limits.call_s)
    first, second = pipeline.creates(event)
    assert second["replayed"]
    assert first["idempotency_key"] == second["idempotency_key"] == key_of(event)


@pytest.mark.parametrize("broker", ["nsq", "redis"])
def test_s2_a_declined_card_is_settled_and_never_retried_by_itself(
    pipeline: Pipeline, broker: str
) -> None:
    event = billing_event(
        f"s2_{broker}", stripe_customer_id=f"cus_decline_insufficient_funds_{broker}"
    )
    pipeline.publish(broker, event)
    pipeline.wait_all_settled([event], within_s=0)
    pipeline.publish(broker, event)
    pipeline.wait_all_settled([event], within_s=0)
    record = pipeline.record(event)
    assert record is not None
    assert (record.state, record.attempt_epoch) == (State.CARD_DECLINED, 0)
    assert (record.error_code, record.decline_code) == ("card_declined", "insufficient_funds")
    sweeps_s = 3 * pipeline.limits.sweep_interval_s
    stays(lambda: len(pipeline.creates(event)) == 1, sweeps_s, "declined once, asked once")
    assert pipeline.charges(event) == []


def test_s3_an_edited_event_is_caught_by_its_fingerprint(pipeline: Pipeline) -> None:
    event = billing_event("s3_edited")
    pipeline.publish("nsq", event)
    pipeline.charged_once(event)
    for broker in ("nsq", "redis"):
        pipeline.publish(broker, {**event, "amount_cents": 9900})
    pipeline.charged_once(event)
    letters = [one for one in pipeline.dead_letters() if one.charge_key == key_of(event)]
    assert {(one.source, one.reason) for one in letters} == {
        ("nsq", "payload_conflict"),
        ("redis", "payload_conflict"),
    }
    assert len(pipeline.creates(event)) == 1


def test_s3_an_idempotency_error_concludes_nothing(pipeline: Pipeline) -> None:
    """lago-api PR#3063: what we send is not what Stripe holds under the key."""
    event = billing_event("s3_clash")
    # Somebody else has used the key, with other parameters.
    foreign = http.request(
        "POST",
        f"{pipeline.stripe.base_url}/v1/payment_intents",
        headers={"Authorization": f"Bearer {STRIPE_KEY}", "Idempotency-Key": key_of(event)},
        fields={"amount": "100", "currency": "usd", "customer": "cus_other"},
        encode_multipart=False,
    )
    assert foreign.status == 200
    pipeline.publish("redis", event)
    wait_until(lambda: pipeline.logged("charge_looked_up", event), SLACK_S, "Stripe is asked")
    assert not pipeline.is_settled(event)
    clock.advance(pipeline.settings["DATABASE_URL"], pipeline.limits.proof_of_absence_s)
    pipeline.wait_all_settled([event], within_s=pipeline.limits.backoff_cap_s)
    record = pipeline.record(event)
    assert record is not None
    assert record.state is State.REVIEW
    assert [request["status"] for request in pipeline.creates(event)] == [400]
    assert pipeline.charges(event) == []
    # It rings once the ledger knows.
    wait_until(lambda: pipeline.logged("alarm_review", event), SLACK_S, "a person is called")


def test_s4_past_the_window_an_unknown_is_looked_up(pipeline: Pipeline) -> None:
    """omnipay-stripe#33: two days old, one that was charged and one that was not."""
    taken, lost = billing_event("s4_taken"), billing_event("s4_lost")
    for event, stage in ((taken, "after_commit"), (lost, "after_claim")):
        customer = event["stripe_customer_id"]
        pipeline.stripe.fault("timeout", stage=stage, customer=customer)
    pipeline.publish("nsq", taken, lost)
    for event in (taken, lost):
        pipeline.wait_sent(event)
    # Before either of them is sent again: that takes the time limit of a call.
    pipeline.kill("worker")
    pipeline.pass_time(2 * DAY_S)
    pipeline.start("worker")
    pipeline.charged_once(taken, lost, within_s=3 * pipeline.limits.redispatch_after_s)
    # One is adopted; the other was proved to be nothing, and charged.
    assert [len(pipeline.creates(event)) for event in (taken, lost)] == [1, 2]
    assert [pipeline.moves(event)["look_up"] for event in (taken, lost)] == [1, 1]
