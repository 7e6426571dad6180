"""The known ways to charge twice through Redis Streams, one test each (docs/failure-modes.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis

from sandbox.backlog import stream_unfinished
from tests.support.pipelines import SHORT_DELIVERIES, SLACK_S, Pipeline
from tests.support.producers import billing_event
from tests.support.roles import Role
from tests.support.waiting import stays, wait_until

PIPELINE_ENV = SHORT_DELIVERIES
MIN_IDLE_S = float(PIPELINE_ENV["MIN_IDLE_S"])
RECLAIMED_S = MIN_IDLE_S + 2.0
IDLE = {"time_since_delivered": None}
"""What changes of an entry that stays where it is."""
MARK = "so-far"


def test_r1_another_consumer_claims_the_entry_while_stripe_still_answers(
    pipeline: Pipeline,
) -> None:
    event = billing_event("r1")
    bridges = [pipeline.roles["bridge-redis"], pipeline.extra("bridge-redis")]
    pipeline.stripe.fault("latency", seconds=1.0)
    # Nor does it end before all has happened to the entry.
    pipeline.fault_point("worker.after_call", "hold")
    pipeline.publish("redis", event)
    pipeline.wait_sent(event)
    with stream(pipeline) as (client, name, group):
        (entry,) = client.xpending_range(name, group, "-", "+", 10)
        # The owner renews it, so no other bridge takes it; a consumer without manners does,
        # and leaves it when the owner has let go of it.
        ids, idle_ms = [entry["message_id"]], int(MIN_IDLE_S * 1000)
        assert client.xclaim(name, group, "thief", 0, ids, justid=True) == ids
        wait_until(lambda: has_lost(bridges, ids[0]), SLACK_S, "the owner has let go of it")
        assert client.xclaim(name, group, "thief", 0, ids, idle=idle_ms, justid=True) == ids
        wait_until(lambda: owners(client, name, group) != {"thief"}, SLACK_S, "a bridge has it")
    pipeline.fault_point.wait_reached("worker.after_call")
    stays(lambda: len(pipeline.creates(event)) == 1, 1.0, "it is not sent again")
    assert not pipeline.is_settled(event)
    pipeline.fault_point.release("worker.after_call")
    pipeline.charged_once(event, within_s=RECLAIMED_S)
    assert len(pipeline.creates(event)) == 1


def test_r1_an_entry_is_not_taken_over_while_its_owner_lives(pipeline: Pipeline) -> None:
    """taskiq-redis#101, #123: three bridges, and a charge far longer than the idle time."""
    event = billing_event("r1_owner")
    for _ in range(2):
        pipeline.extra("bridge-redis")
    with stream(pipeline) as (client, name, group), client.monitor() as monitor:
        pipeline.roles["worker"].freeze()
        pipeline.publish("redis", event)
        wait_until(lambda: owners(client, name, group), SLACK_S, "it is delivered")
        (entry,) = client.xpending_range(name, group, "-", "+", 10)
        stays(
            lambda: client.xpending_range(name, group, "-", "+", 10)[0] | IDLE == entry | IDLE,
            MIN_IDLE_S + 1.2,
            "its owner keeps it, delivered once",
        )
        pipeline.roles["worker"].thaw()
        wait_until(lambda: not owners(client, name, group), SLACK_S, "it is acked")
        assert len(acks_of(entry["message_id"], client, monitor)) == 1
    pipeline.charged_once(event)
    assert len(pipeline.creates(event)) == 1


def test_r2_a_batch_of_which_some_were_charged_before_the_crash(pipeline: Pipeline) -> None:
    events = [billing_event(f"r2_{n}") for n in range(8)]
    # Whichever comes there first is the one that is not settled before the crash.
    pipeline.fault_point("worker.after_call", "hold")
    pipeline.fault_point("bridge.before_ack", "kill")
    pipeline.publish("redis", *events)
    assert pipeline.roles["bridge-redis"].wait_exit() == -9
    pipeline.fault_point.wait_reached("worker.after_call")
    settled = [pipeline.is_settled(event) for event in events]
    assert any(settled)
    assert not all(settled)
    pipeline.fault_point.release("worker.after_call")
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


def has_lost(bridges: Sequence[Role], entry_id: str) -> bool:
    """Whether one of them has found that the entry is somebody else's."""
    lines = [line for bridge in bridges for line in bridge.log().splitlines()]
    return any("ownership_lost" in line and entry_id in line for line in lines)


def owners(client: Any, name: str, group: str) -> set[str]:
    """Who has entries that are not acked."""
    return {entry["consumer"] for entry in client.xpending_range(name, group, "-", "+", 10)}


def acks_of(entry_id: str, client: Any, monitor: Any) -> list[str]:
    """The XACKs of this entry, from everybody, that Redis has seen since it is monitored."""
    client.echo(MARK)
    commands = iter(lambda: str(monitor.next_command()["command"]), f"ECHO {MARK}")
    return [c for c in commands if c.startswith("XACK ") and entry_id in c.split()]


@contextmanager
def stream(pipeline: Pipeline) -> Iterator[tuple[Any, str, str]]:
    """A client, the stream and the group."""
    settings = pipeline.settings
    with redis.Redis.from_url(settings["REDIS_URL"], decode_responses=True) as client:
        yield client, settings["REDIS_STREAM"], settings["REDIS_GROUP"]
