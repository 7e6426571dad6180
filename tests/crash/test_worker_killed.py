"""kill -9 and SIGSTOP of workers at every step of a charge (celery#4250, celery#3541)."""

from __future__ import annotations

import os
import re
import signal

import pytest

from models.limits import FAST_LIMITS
from tests.support.pipelines import SLACK_S, Pipeline
from tests.support.producers import billing_event
from tests.support.roles import Role
from tests.support.waiting import wait_until

LEASE_OVER_S = FAST_LIMITS.lease_s + FAST_LIMITS.sweep_interval_s + FAST_LIMITS.call_s
"""What a charge takes that a dead worker had claimed: its lease, the sweep, another call."""
PUBLISHED_AGAIN_S = FAST_LIMITS.redispatch_after_s + FAST_LIMITS.call_s
"""The same where no record was written yet: the bridge publishes the event again."""

STEPS = {
    "worker.before_claim": (PUBLISHED_AGAIN_S, 1),
    "worker.after_claim": (LEASE_OVER_S, 1),
    "worker.before_send": (LEASE_OVER_S, 1),
    "worker.after_call": (LEASE_OVER_S, 2),
    "worker.after_outcome": (0.0, 1),
}
"""Each step with its recovery bound in seconds and the number of requests that Stripe sees."""


@pytest.mark.parametrize("step", STEPS)
def test_a_killed_worker_child_costs_no_charge_and_makes_none_twice(
    pipeline: Pipeline, step: str
) -> None:
    event = billing_event(f"child_{step.replace('.', '_')}")
    pipeline.fault_point(step, "kill")
    pipeline.publish("nsq", event)
    pipeline.fault_point.wait_reached(step)
    bound_s, requests = STEPS[step]
    pipeline.charged_once(event, within_s=bound_s)
    assert len(pipeline.creates(event)) == requests
    assert pipeline.roles["worker"].alive


@pytest.mark.parametrize("step", STEPS)
def test_a_worker_killed_whole_is_taken_over_by_the_next_one(pipeline: Pipeline, step: str) -> None:
    event = billing_event(f"whole_{step.replace('.', '_')}")
    pipeline.fault_point(step, "hold")
    pipeline.publish("redis", event)
    pipeline.fault_point.wait_reached(step)
    pipeline.kill("worker")
    pipeline.start("worker")
    bound_s, requests = STEPS[step]
    pipeline.charged_once(event, within_s=bound_s)
    assert len(pipeline.creates(event)) == requests


def test_a_parent_killed_with_several_calls_under_way(pipeline: Pipeline) -> None:
    events = [billing_event(f"parent_{n}") for n in range(8)]
    # The calls hang, as long as their own limit lets them, until they are let go.
    pipeline.stripe.fault("latency", stage="after_commit", seconds=60.0, times=4)
    pipeline.publish("nsq", *events[:4])
    pipeline.publish("redis", *events[4:])
    wait_until(lambda: len(pipeline.charges(*events)) >= 4, SLACK_S, "four calls are under way")
    os.kill(pipeline.roles["worker"].pid, signal.SIGKILL)
    pipeline.roles["worker"].wait_exit()
    pipeline.stripe.release()
    pipeline.start("worker")
    pipeline.charged_once(*events, within_s=LEASE_OVER_S)


def test_a_worker_that_slept_through_its_lease_does_not_send(pipeline: Pipeline) -> None:
    event = billing_event("slept")
    pipeline.kill("worker")
    # The threads pool: there is no parent that would end the sleeper by its time limit.
    sleeper = pipeline.extra("worker", pool="threads")
    pipeline.fault_point("worker.before_send", "freeze")
    pipeline.publish("nsq", event)
    pipeline.fault_point.wait_reached("worker.before_send")
    earlier = len(sleeper.log())
    pipeline.start("worker")
    pipeline.charged_once(event, within_s=LEASE_OVER_S)
    sleeper.thaw()
    said = log_of_a_late_end(sleeper, earlier)
    assert "applied=fenced" in said
    assert "alarm_" not in said
    assert len(pipeline.creates(event)) == 1
    pipeline.charged_once(event)


def test_an_answer_that_comes_after_the_lease_changes_nothing(pipeline: Pipeline) -> None:
    event = billing_event("late_answer")
    pipeline.kill("worker")
    sleeper = pipeline.extra("worker", pool="threads")
    pipeline.stripe.fault("latency", stage="after_commit", seconds=60.0)
    pipeline.publish("redis", event)
    wait_until(lambda: pipeline.charges(event), SLACK_S, "Stripe took the money")
    sleeper.freeze()
    pipeline.stripe.release()
    earlier = len(sleeper.log())
    assert not pipeline.is_settled(event)
    pipeline.start("worker")
    pipeline.charged_once(event, within_s=LEASE_OVER_S)
    assert [request["replayed"] for request in pipeline.creates(event)] == [False, True]
    sleeper.thaw()
    assert "alarm_" not in log_of_a_late_end(sleeper, earlier)
    pipeline.charged_once(event)


def log_of_a_late_end(sleeper: Role, earlier: int) -> str:
    """What it has logged from this length on, once the task that it slept in is over.

    One that came to it meanwhile says `skip:charged`.
    """

    def ended() -> str | None:
        said = sleeper.log()[earlier:]
        return said if re.search(r"charge_done .*done=charged\b", said) else None

    return wait_until(ended, SLACK_S, "the sleeper has ended its task") or ""
