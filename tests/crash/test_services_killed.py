"""kill -9 of PostgreSQL, Redis, nsqd and Stripe itself while charges are under way."""

from __future__ import annotations

import pytest

from models.limits import FAST_LIMITS
from tests.support.pipelines import SLACK_S, Event, Pipeline
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


def events_in_mid_flow(pipeline: Pipeline, name: str) -> list[Event]:
    """Events through both brokers; Stripe works on some of them when this returns."""
    events: list[Event] = [
        billing_event(f"{name}_{n}", amount_cents=1000 + n) for n in range(EVENTS)
    ]
    pipeline.stripe.fault("latency", stage="after_commit", seconds=0.5, times=EVENTS)
    for number, event in enumerate(events):
        pipeline.publish("nsq" if number % 2 else "redis", event)
    wait_until(
        lambda: sum(len(pipeline.creates(event)) for event in events) >= 3,
        SLACK_S,
        "some calls are under way",
    )
    return events


def everyone_is_alive(pipeline: Pipeline) -> bool:
    return all(role.alive for role in pipeline.roles.values())


@pytest.mark.parametrize("service", ["postgres", "redis", "nsqd", "stripe"])
def test_a_service_killed_in_mid_flow_and_started_again(pipeline: Pipeline, service: str) -> None:
    events = events_in_mid_flow(pipeline, service)
    pipeline.services.kill(service)
    assert everyone_is_alive(pipeline)
    pipeline.services.heal()
    pipeline.charged_once(*events, within_s=RECOVERY_S)
    assert everyone_is_alive(pipeline)


@pytest.mark.parametrize("service", ["postgres", "redis", "nsqd"])
def test_a_service_frozen_in_mid_flow_that_goes_on_later(pipeline: Pipeline, service: str) -> None:
    events = events_in_mid_flow(pipeline, f"frozen_{service}")
    pipeline.services.freeze(service)
    stays(lambda: everyone_is_alive(pipeline), FROZEN_S, "everyone waits")
    pipeline.services.thaw(service)
    pipeline.charged_once(*events, within_s=RECOVERY_S)
    assert everyone_is_alive(pipeline)
