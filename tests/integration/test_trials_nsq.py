"""What has gone wrong for others with NSQ, tried on the whole product."""

from __future__ import annotations

import re
from collections.abc import Callable

from sandbox import health
from sandbox.backlog import nsq_unfinished
from sandbox.ports import free_port
from sandbox.stack import create_channel
from tests.support.bridges import RequeuesInARow, metric
from tests.support.pipelines import SHORT_DELIVERIES, SLACK_S, Event, Pipeline
from tests.support.producers import billing_event, publish_nsq
from tests.support.waiting import stays, wait_until

PIPELINE_ENV = SHORT_DELIVERIES
AnotherNsqd = Callable[..., dict[str, str]]


class SideLine:
    """One more nsqd, with options of its own, and a bridge from it to the same ledger."""

    def __init__(self, pipeline: Pipeline, nsqd: dict[str, str], **changes: str) -> None:
        topic = f"side-line-{pipeline.services.number()}"
        env = {**nsqd, "NSQ_TOPIC": topic, **changes}
        self.settings = {**pipeline.settings, **env}
        create_channel(self.settings)
        self.bridge = pipeline.extra("bridge-nsq", wait=False, **env)
        wait_until(lambda: self.channel()["client_count"] >= 1, SLACK_S, "the bridge is there")

    def channel(self) -> Event:
        return health.channel_stats(self.settings)

    def wait_empty(self) -> None:
        wait_until(lambda: nsq_unfinished(self.settings) == 0, SLACK_S, "all is acked")


def test_pynsq_142_nsq_974_a_message_is_never_finished_for_its_many_deliveries(
    pipeline: Pipeline, another_nsqd: AnotherNsqd
) -> None:
    nsqd = another_nsqd("--msg-timeout=1500ms", "--max-msg-timeout=2s")
    side = SideLine(pipeline, nsqd, MSG_TIMEOUT_S="1.5")
    event = billing_event("pynsq_142")
    pipeline.services.kill("postgres")
    publish_nsq(side.settings, event)
    wait_until(
        lambda: deliveries_again(side.channel()) >= 6,
        2 * SLACK_S,
        "delivered far more than 5 times",
    )
    assert nsq_unfinished(side.settings) > 0
    assert pipeline.creates(event) == []
    pipeline.services.heal()
    pipeline.charged_once(event, within_s=pipeline.limits.backoff_cap_s)
    side.wait_empty()
    assert len(pipeline.creates(event)) == 1


def test_pynsq_205_touching_stops_in_time_before_the_longest_message_timeout(
    pipeline: Pipeline, another_nsqd: AnotherNsqd
) -> None:
    nsqd = another_nsqd("--msg-timeout=4s", "--max-msg-timeout=5s")
    side = SideLine(pipeline, nsqd, MSG_TIMEOUT_S="4", TOUCH_S="1.3")
    event = billing_event("pynsq_205")
    pipeline.fault_point("worker.before_send", "hold")
    publish_nsq(side.settings, event)
    requeued = RequeuesInARow(side.channel, 1)
    wait_until(requeued, SLACK_S, "requeued in progress")
    assert not pipeline.is_settled(event)
    pipeline.fault_point.release("worker.before_send")
    pipeline.charged_once(event)
    side.wait_empty()
    assert side.channel()["timeout_count"] == requeued.timeouts
    assert side.bridge.alive
    assert len(pipeline.creates(event)) == 1


def test_pynsq_104_and_151_a_frozen_task_queue_does_not_block_the_connection_to_nsqd(
    pipeline: Pipeline,
) -> None:
    """Also celery#4296 and #4383: publications fail in time, one after the other."""
    event = billing_event("pynsq_104")
    bridge = pipeline.roles["bridge-nsq"]
    failed = bridge.log().count("publish_failed")
    before = pipeline.channel()["timeout_count"]
    pipeline.services.freeze("redis")
    pipeline.publish("nsq", event)
    wait_until(
        lambda: bridge.log().count("publish_failed") >= failed + 2, SLACK_S, "it failed, and again"
    )
    # Touched throughout: a loop that stands still would lose it to the message timeout.
    stays(lambda: pipeline.channel()["in_flight_count"] == 1, 2.0, "held and not acked")
    assert pipeline.channel()["timeout_count"] == before
    assert pipeline.creates(event) == []
    pipeline.services.thaw("redis")
    pipeline.charged_once(event, within_s=2 * pipeline.limits.backoff_cap_s)


def test_pynsq_0_9_0_sigterm_hands_back_what_is_in_flight(pipeline: Pipeline) -> None:
    events = [billing_event(f"sigterm_{n}") for n in range(3)]
    pipeline.kill("bridge-nsq")
    pipeline.roles["worker"].freeze()
    probes = f"127.0.0.1:{free_port()}"
    long = {"MSG_TIMEOUT_S": "60", "TOUCH_S": "20"}
    bridge = pipeline.extra("bridge-nsq", **long, BRIDGE_HEALTH_LISTEN=probes)
    pipeline.publish("nsq", *events)
    wait_until(lambda: metric(probes, "in_flight") == 3, SLACK_S, "the bridge holds all three")
    bridge.terminate()
    assert bridge.wait_exit() == 0
    # Long before their message timeout.
    wait_until(lambda: at_rest(pipeline.channel()) == (3, 0), 30, "they are there for the next one")
    assert len(re.findall(r" handed_back .*delivery_id=\w+", bridge.log())) == 3
    pipeline.roles["worker"].thaw()
    pipeline.start("bridge-nsq")
    pipeline.charged_once(*events)
    assert [len(pipeline.creates(event)) for event in events] == [1, 1, 1]


def at_rest(channel: Event) -> tuple[int, int]:
    """Messages that wait, and messages in flight."""
    return channel["depth"], channel["in_flight_count"]


def deliveries_again(channel: Event) -> int:
    return int(channel["timeout_count"] + channel["requeue_count"])
