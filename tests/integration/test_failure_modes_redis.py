"""The known ways to charge twice through Redis Streams, one test each (docs/failure-modes.md)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis

from sandbox.backlog import stream_unfinished
from tests.support.pipelines import SHORT_DELIVERIES, SLACK_S, Pipeline
from tests.support.producers import billing_event
from tests.support.waiting import stays, wait_until

PIPELINE_ENV = SHORT_DELIVERIES
MIN_IDLE_S = float(PIPELINE_ENV["MIN_IDLE_S"])
RECLAIMED_S = MIN_IDLE_S + 2.0


def test_r1_another_consumer_claims_the_entry_while_stripe_still_answers(
    pipeline: Pipeline,
) -> None:
    event = billing_event("r1")
    pipeline.extra("bridge-redis")
    pipeline.stripe.fault("latency", seconds=MIN_IDLE_S + 1.2)
    pipeline.publish("redis", event)
    pipeline.wait_sent(event)
    with stream(pipeline) as (client, name, group):
        (entry,) = client.xpending_range(name, group, "-", "+", 10)
        # The owner renews it, so no other bridge takes it; a consumer without manners does.
        reply = client.xautoclaim(name, group, "thief", min_idle_time=0)
        assert [claimed for claimed, _ in reply[1]] == [entry["message_id"]]
    assert not pipeline.is_settled(event)
    pipeline.charged_once(event, within_s=RECLAIMED_S)
    assert len(pipeline.creates(event)) == 1


def test_r1_an_entry_is_not_taken_over_while_its_owner_lives(pipeline: Pipeline) -> None:
    """taskiq-redis#101, #123: three bridges, and a charge far longer than the idle time."""
    event = billing_event("r1_owner")
    for _ in range(2):
        pipeline.extra("bridge-redis")
    with stream(pipeline) as (client, name, group):
        acks = acks_sent(client)
        pipeline.stripe.fault("latency", seconds=MIN_IDLE_S + 1.2)
        pipeline.publish("redis", event)
        pipeline.wait_sent(event)
        owners = set()
        while pending := client.xpending_range(name, group, "-", "+", 10):
            owners.add((pending[0]["consumer"], pending[0]["times_delivered"]))
        assert [times for _, times in owners] == [1]
        assert acks_sent(client) == acks + 1
    pipeline.charged_once(event)
    assert len(pipeline.creates(event)) == 1


def test_r2_a_batch_of_which_some_were_charged_before_the_crash(pipeline: Pipeline) -> None:
    events = [billing_event(f"r2_{n}") for n in range(8)]
    slow = events[4:]
    for event in slow:
        customer = event["stripe_customer_id"]
        pipeline.stripe.fault("latency", seconds=2.0, customer=customer)
    pipeline.fault_point("bridge.before_ack", "kill")
    pipeline.publish("redis", *events)
    assert pipeline.roles["bridge-redis"].wait_exit() == -9
    assert not pipeline.is_settled(*slow)
    pipeline.start("bridge-redis")
    pipeline.charged_once(*events, within_s=RECLAIMED_S)
    assert [len(pipeline.creates(event)) for event in events] == [1] * 8


def test_r3_entries_whose_ack_was_lost_are_acked_again(pipeline: Pipeline) -> None:
    events = [billing_event(f"r3_{n}") for n in range(5)]
    pipeline.publish("redis", *events)
    pipeline.charged_once(*events)
    with stream(pipeline) as (client, name, group):
        # As after a failover: the group is back at a point before the acks.
        client.xgroup_setid(name, group, "0")
    wait_until(lambda: stream_unfinished(pipeline.settings) == 0, SLACK_S, "all acked again")
    pipeline.charged_once(*events)
    assert [len(pipeline.creates(event)) for event in events] == [1] * 5


def test_r5_a_crash_between_the_ledger_and_the_ack(pipeline: Pipeline) -> None:
    event = billing_event("r5")
    pipeline.fault_point("bridge.before_ack", "kill")
    pipeline.publish("redis", event)
    assert pipeline.roles["bridge-redis"].wait_exit() == -9
    assert pipeline.is_settled(event)
    stays(lambda: stream_unfinished(pipeline.settings) == 1, 1.0, "nobody acks it meanwhile")
    pipeline.start("bridge-redis")
    pipeline.charged_once(event, within_s=RECLAIMED_S)
    assert len(pipeline.creates(event)) == 1


def acks_sent(client: Any) -> int:
    """XACKs that Redis has seen, from everybody."""
    return int(client.info("commandstats").get("cmdstat_xack", {"calls": 0})["calls"])


@contextmanager
def stream(pipeline: Pipeline) -> Iterator[tuple[Any, str, str]]:
    """A client, the stream and the group."""
    settings = pipeline.settings
    with redis.Redis.from_url(settings["REDIS_URL"], decode_responses=True) as client:
        yield client, settings["REDIS_STREAM"], settings["REDIS_GROUP"]
