"""kill -9 of PostgreSQL, Redis, nsqd and Stripe itself while charges are under way."""

from __future__ import annotations

import pytest
import redis

from bridges.dispatcher import QUEUE
from models.limits import FAST_LIMITS
from tests.support.pipelines import SLACK_S, Event, Pipeline, key_of
from tests.support.producers import billing_event
from tests.support.waiting import stays, wait_until

EVENTS = 12
FROZEN_S = FAST_LIMITS.msg_timeout_s + 1.0
"""Longer than a worker's lease and a bridge's hold on a delivery."""
RECONNECTED_S = 10.0
"""Bridges and workers try a part that was away again after at most so long."""
RECOVERY_S = (
    RECONNECTED_S
    + FAST_LIMITS.visibility_timeout_s
    + FAST_LIMITS.lease_s
    + FAST_LIMITS.sweep_interval_s
    + FAST_LIMITS.call_s
)


HELD = ("worker.before_send", "worker.after_call")


def events_in_mid_flow(pipeline: Pipeline, name: str) -> list[Event]:
    """Events through both brokers. When this returns, two of them stand before and after their
    call until `go_on`, and no bridge has still to be given any.
    """
    events: list[Event] = [
        billing_event(f"{name}_{n}", amount_cents=1000 + n) for n in range(EVENTS)
    ]
    pipeline.stripe.fault("latency", stage="after_commit", seconds=0.5, times=EVENTS)
    for point in HELD:
        pipeline.fault_point(point, "hold")
    for number, event in enumerate(events):
        pipeline.publish("nsq" if number % 2 else "redis", event)
    for point in HELD:
        pipeline.fault_point.wait_reached(point)
    # nsqd has no copy left of what is on its way to a bridge, nor Redis of what it still has to
    # write to its file.
    wait_until(lambda: all(handed_on(pipeline, e) for e in events), SLACK_S, "bridges have all")
    wait_until(lambda: written(pipeline), SLACK_S, "Redis has written all")
    return events


def go_on(pipeline: Pipeline) -> None:
    for point in HELD:
        pipeline.fault_point.release(point)


def handed_on(pipeline: Pipeline, event: Event) -> bool:
    """Whether a task for it waits or is with a worker, or it has a record already."""
    key = key_of(event).encode()
    with redis.Redis.from_url(pipeline.settings["CELERY_BROKER_URL"]) as client:
        # In the order in which a task moves on.
        tasks = [*client.lrange(QUEUE, 0, -1), *client.hvals("unacked")]
    return any(key in task for task in tasks) or pipeline.record(event) is not None


def written(pipeline: Pipeline) -> bool:
    with redis.Redis.from_url(pipeline.settings["REDIS_URL"]) as client:
        return int(client.info("persistence")["aof_buffer_length"]) == 0


def everyone_is_alive(pipeline: Pipeline) -> bool:
    return all(role.alive for role in pipeline.roles.values())


@pytest.mark.parametrize("service", ["postgres", "redis", "nsqd", "stripe"])
def test_a_service_killed_in_mid_flow_and_started_again(pipeline: Pipeline, service: str) -> None:
    events = events_in_mid_flow(pipeline, service)
    pipeline.services.kill(service)
    go_on(pipeline)
    assert everyone_is_alive(pipeline)
    pipeline.services.heal()
    pipeline.charged_once(*events, within_s=RECOVERY_S)
    assert everyone_is_alive(pipeline)


@pytest.mark.parametrize("service", ["postgres", "redis", "nsqd"])
def test_a_service_frozen_in_mid_flow_that_goes_on_later(pipeline: Pipeline, service: str) -> None:
    events = events_in_mid_flow(pipeline, f"frozen_{service}")
    pipeline.services.freeze(service)
    go_on(pipeline)
    stays(lambda: everyone_is_alive(pipeline), FROZEN_S, "everyone waits")
    pipeline.services.thaw(service)
    pipeline.charged_once(*events, within_s=RECOVERY_S)
    assert everyone_is_alive(pipeline)
