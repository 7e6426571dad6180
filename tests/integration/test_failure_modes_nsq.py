"""The known ways to charge twice through NSQ, one test each (docs/failure-modes.md)."""

from __future__ import annotations

import time

from sandbox import health
from sandbox.ports import free_port
from tests.support.bridges import metric
from tests.support.pipelines import SHORT_DELIVERIES, SLACK_S, Pipeline, key_of
from tests.support.producers import billing_event
from tests.support.waiting import stays, wait_until

PIPELINE_ENV = SHORT_DELIVERIES
MSG_TIMEOUT_S = float(PIPELINE_ENV["MSG_TIMEOUT_S"])
DELIVERED_AGAIN_S = MSG_TIMEOUT_S + 5.0
CALL = "worker.before_send"
"""Whoever is held here has claimed the record, as a call that takes its time."""
DAY_S = 25 * 3600.0


def test_n1_no_attempts_counter_in_the_key(pipeline: Pipeline) -> None:
    event = billing_event("n1")
    timed_out = pipeline.channel()["timeout_count"]
    pipeline.fault_point("bridge.before_ack", "kill")
    pipeline.publish("nsq", event)
    assert pipeline.roles["bridge-nsq"].wait_exit() == -9
    pipeline.fault_point.release("bridge.before_ack")
    pipeline.fault_point("bridge.before_ack", "kill")
    assert pipeline.extra("bridge-nsq", wait=False).wait_exit() == -9
    pipeline.start("bridge-nsq")
    pipeline.charged_once(event, within_s=DELIVERED_AGAIN_S)
    assert pipeline.channel()["timeout_count"] >= timed_out + 2
    assert [request["idempotency_key"] for request in pipeline.creates(event)] == [key_of(event)]


def test_n2_no_connection_process_or_address_in_the_key(pipeline: Pipeline) -> None:
    event = billing_event("n2")
    pipeline.fault_point("bridge.before_ack", "kill")
    pipeline.publish("nsq", event)
    pipeline.roles["bridge-nsq"].wait_exit()
    # nsqd comes back with what its disk holds, and a day later: Stripe has forgotten the key.
    pipeline.services.stop("nsqd")
    pipeline.services.start("nsqd")
    wait_until(lambda: pipeline.channel()["depth"] == 1, SLACK_S, "it is there again")
    pipeline.pass_time(DAY_S)
    pipeline.start("bridge-nsq")
    pipeline.charged_once(event)
    assert len(pipeline.creates(event)) == 1


def test_n3_a_call_longer_than_the_message_timeout_blocks_no_bridge(pipeline: Pipeline) -> None:
    slow, quick = billing_event("n3_slow"), billing_event("n3_quick")
    before = pipeline.channel()
    pipeline.fault_point(CALL, "hold")
    pipeline.publish("nsq", slow)
    pipeline.fault_point.wait_reached(CALL)
    begun = time.monotonic()
    pipeline.publish("nsq", quick)
    wait_until(lambda: pipeline.is_settled(quick), SLACK_S, "another event passes by")
    left_s = begun + MSG_TIMEOUT_S + 1.0 - time.monotonic()
    stays(lambda: not pipeline.is_settled(slow), left_s, "the call goes on")
    assert not pipeline.is_settled(slow)
    pipeline.fault_point.release(CALL)
    pipeline.charged_once(slow, quick)
    after = pipeline.channel()
    assert after["timeout_count"] == before["timeout_count"]
    assert len(pipeline.creates(slow)) == 1


def test_n3_a_late_finish_is_harmless(pipeline: Pipeline) -> None:
    """nsq#729: two bridges, and a charge that takes longer than the message timeout."""
    event = billing_event("n3_late")
    bridge = pipeline.roles["bridge-nsq"]
    refused, timed_out = bridge.log().count("_FAILED"), pipeline.channel()["timeout_count"]
    pipeline.fault_point(CALL, "hold")
    pipeline.publish("nsq", event)
    pipeline.fault_point.wait_reached(CALL)
    bridge.freeze()
    acked = pipeline.nsq_acked()
    probes = f"127.0.0.1:{free_port()}"
    other = pipeline.extra("bridge-nsq", BRIDGE_HEALTH_LISTEN=probes)
    bound_s = DELIVERED_AGAIN_S + SLACK_S
    wait_until(lambda: pipeline.channel()["timeout_count"] > timed_out, bound_s, "it times out")
    wait_until(lambda: metric(probes, "taken_total"), SLACK_S, "the other one takes it")
    stays(lambda: pipeline.creates(event) == [], 1.0, "nobody overtakes the call")
    pipeline.fault_point.release(CALL)
    wait_until(lambda: pipeline.nsq_acked() > acked, bound_s, "the other acks")
    bridge.thaw()
    wait_until(
        lambda: bridge.log().count("_FAILED") > refused, SLACK_S, "nsqd refuses the late answer"
    )
    pipeline.charged_once(event)
    assert bridge.alive
    assert other.alive
    assert len(pipeline.creates(event)) == 1


def test_n3b_a_back_off_is_waited_for_in_the_ledger_not_in_a_handler(pipeline: Pipeline) -> None:
    """celery#9342: Stripe is broken for a while; the sweep goes on when Celery has ended."""
    event = billing_event("n3b")
    before = pipeline.channel()["timeout_count"]
    pipeline.stripe.fault("http_500", times=3, customer=event["stripe_customer_id"])
    pipeline.fault_point(CALL, "hold")
    pipeline.publish("nsq", event)
    pipeline.fault_point.wait_reached(CALL)
    # The next one to come there makes the second try.
    pipeline.fault_point(CALL, "hold")
    pipeline.fault_point.release(CALL)
    cap_s = pipeline.limits.backoff_cap_s
    bound_s = 3 * (cap_s + pipeline.limits.redispatch_after_s)
    pipeline.fault_point.wait_reached(CALL, bound_s + SLACK_S)
    assert len(pipeline.creates(event)) == 1
    assert pipeline.unfinished() == 1
    pipeline.fault_point.release(CALL)
    pipeline.charged_once(event, within_s=bound_s)
    assert len(pipeline.creates(event)) == 4
    assert pipeline.channel()["timeout_count"] == before


def test_n4_what_comes_back_after_a_pause_of_the_channel(pipeline: Pipeline) -> None:
    event = billing_event("n4")
    bridge = pipeline.roles["bridge-nsq"]
    pipeline.fault_point(CALL, "hold")
    pipeline.publish("nsq", event)
    pipeline.fault_point.wait_reached(CALL)
    pause_channel(pipeline, "pause")
    bridge.freeze()
    pipeline.fault_point.release(CALL)
    wait_until(
        lambda: pipeline.channel()["depth"] == 1,
        DELIVERED_AGAIN_S + SLACK_S,
        "what was in flight is back in the channel",
    )
    bridge.thaw()
    wait_until(lambda: pipeline.is_settled(event), SLACK_S, "charged meanwhile")
    stays(lambda: pipeline.unfinished() == 1, 1.0, "a paused channel delivers nothing")
    pause_channel(pipeline, "unpause")
    pipeline.charged_once(event)
    assert len(pipeline.creates(event)) == 1


def test_n5_another_consumer_gets_the_messages_of_a_killed_one(pipeline: Pipeline) -> None:
    events = [billing_event(f"n5_{n}") for n in range(4)]
    before = pipeline.channel()["timeout_count"]
    pipeline.roles["worker"].freeze()
    other = pipeline.extra("bridge-nsq")
    pipeline.publish("nsq", *events)
    wait_until(lambda: pipeline.channel()["in_flight_count"] == 4, SLACK_S, "all are in flight")
    other.kill()
    pipeline.kill("bridge-nsq")
    pipeline.roles["worker"].thaw()
    pipeline.start("bridge-nsq")
    pipeline.charged_once(*events, within_s=DELIVERED_AGAIN_S)
    # nsqd gives them to another one when their time is over, and not before.
    assert pipeline.channel()["timeout_count"] >= before + 4
    assert [len(pipeline.creates(event)) for event in events] == [1, 1, 1, 1]


def test_n6_past_the_window_stripe_is_asked_not_charged_again(pipeline: Pipeline) -> None:
    event = billing_event("n6")
    pipeline.stripe.fault("timeout", stage="after_commit")
    pipeline.publish("nsq", event)
    wait_until(lambda: pipeline.charges(event), SLACK_S, "Stripe took the money")
    pipeline.kill("worker")
    pipeline.pass_time(DAY_S)
    pipeline.start("worker")
    pipeline.charged_once(event, within_s=pipeline.limits.redispatch_after_s)
    # Nothing was sent again, and Stripe would have taken it: the key is forgotten by now.
    assert len(pipeline.creates(event)) == 1
    assert pipeline.moves(event)["look_up"] == 1


def test_n7_an_event_published_twice_is_charged_once(pipeline: Pipeline) -> None:
    event = billing_event("n7", event_id="evt_1")
    pipeline.publish("nsq", event, event)
    pipeline.charged_once(event)
    # Another message id, another event id, another text, the other broker: the same charge.
    again = {**event, "event_id": "evt_2", "description": "sent once more"}
    pipeline.publish("nsq", again)
    pipeline.publish("redis", again)
    pipeline.charged_once(event)
    assert len(pipeline.creates(event)) == 1


def test_n9_while_the_ledger_is_away_nothing_is_claimed_called_or_acked(pipeline: Pipeline) -> None:
    paid, fresh = billing_event("n9_paid"), billing_event("n9_fresh")
    pipeline.publish("nsq", paid)
    pipeline.charged_once(paid)
    pipeline.services.kill("postgres")
    acked = pipeline.nsq_acked()
    pipeline.publish("nsq", paid, fresh)
    wait_until(lambda: pipeline.channel()["in_flight_count"] == 2, SLACK_S, "the bridge has both")
    stays(lambda: pipeline.nsq_acked() == acked, MSG_TIMEOUT_S + 1.0, "neither is acked")
    assert pipeline.creates(fresh) == []
    pipeline.services.heal()
    pipeline.charged_once(paid, fresh, within_s=DELIVERED_AGAIN_S)
    assert len(pipeline.creates(paid)) == 1


def pause_channel(pipeline: Pipeline, action: str) -> None:
    settings = pipeline.settings
    query = f"topic={settings['NSQ_TOPIC']}&channel={settings['NSQ_CHANNEL']}"
    health.request("POST", f"http://{settings['NSQD_HTTP_ADDRESS']}/channel/{action}?{query}")
