"""kill -9 of a bridge at every step between taking a delivery and its ack."""

from __future__ import annotations

import pytest

from models.limits import FAST_LIMITS
from tests.support.pipelines import SLACK_S, Pipeline
from tests.support.producers import billing_event
from tests.support.waiting import wait_until

TIMERS_LATE_S = 5.0
"""nsqd's timers of a young channel can fire so much too late."""
DELIVERED_AGAIN_S = FAST_LIMITS.msg_timeout_s + TIMERS_LATE_S + FAST_LIMITS.call_s
"""The broker waits for the dead bridge's lease on the delivery; then it is charged if need be."""


@pytest.mark.parametrize("broker", ["nsq", "redis"])
@pytest.mark.parametrize(
    "step", ["bridge.before_publish", "bridge.after_publish", "bridge.before_ack"]
)
def test_a_bridge_killed_between_delivery_and_ack(
    pipeline: Pipeline, broker: str, step: str
) -> None:
    event = billing_event(f"{broker}_{step.replace('.', '_')}")
    pipeline.fault_point(step, "kill")
    pipeline.publish(broker, event)
    bridge = pipeline.roles[f"bridge-{broker}"]
    assert bridge.wait_exit() == -9
    pipeline.start(f"bridge-{broker}")
    pipeline.charged_once(event, within_s=DELIVERED_AGAIN_S)
    assert len(pipeline.creates(event)) == 1


@pytest.mark.parametrize("broker", ["nsq", "redis"])
def test_a_bridge_killed_right_after_an_ack_has_nothing_to_catch_up_on(
    pipeline: Pipeline, broker: str
) -> None:
    events = [billing_event(f"{broker}_after_ack_{n}") for n in range(3)]
    pipeline.fault_point("bridge.after_ack", "kill")
    pipeline.publish(broker, *events)
    assert pipeline.roles[f"bridge-{broker}"].wait_exit() == -9
    pipeline.start(f"bridge-{broker}")
    pipeline.charged_once(*events, within_s=DELIVERED_AGAIN_S)


@pytest.mark.parametrize("broker", ["nsq", "redis"])
def test_a_bridge_killed_before_the_dead_letter_buries_it_after_its_restart(
    pipeline: Pipeline, broker: str
) -> None:
    body = f"no event, from {broker}".encode()
    known = pipeline.dead_letters()
    pipeline.fault_point("bridge.before_dead_letter", "kill")
    pipeline.publish(broker, body)
    assert pipeline.roles[f"bridge-{broker}"].wait_exit() == -9
    assert pipeline.dead_letters() == known
    pipeline.start(f"bridge-{broker}")
    bound_s = DELIVERED_AGAIN_S + SLACK_S
    # The dead letter first: while nsqd takes a timed-out message back it may count it nowhere.
    wait_until(lambda: len(pipeline.dead_letters()) > len(known), bound_s, "it is buried")
    wait_until(pipeline.nothing_left, bound_s, "the delivery is acked")
    letters = [letter for letter in pipeline.dead_letters() if letter not in known]
    assert [letter.source for letter in letters] == [broker]
    assert [(letter.reason, letter.count) for letter in letters] == [("invalid_json", 1)]
