"""What has gone wrong for others with Celery and with Stripe, tried on the whole product."""

from __future__ import annotations

import re

import pytest
from celery import Celery

from models.events import event_from_json
from sandbox import clock
from tests.support.pipelines import SHORT_DELIVERIES, SLACK_S, Event, Pipeline, key_of
from tests.support.producers import billing_event
from tests.support.roles import Role
from tests.support.waiting import NeverHappenedError, wait_until

PIPELINE_ENV = SHORT_DELIVERIES
FLOW = 500
STOPS_AT = (10, 130, 250, 370, 490)
"""Charges made when the workers are told to stop."""
STOP_GRACE_S = 20.0
LIMITER_TOO_SLOW = re.compile(r"alarm_limiter_lost .*why=TimeoutError")


def test_kombu_337_and_celery_2599_a_task_that_waits_longer_than_its_visibility(
    pipeline: Pipeline,
) -> None:
    event = billing_event("kombu_337")
    other = pipeline.extra("worker", VISIBILITY_TIMEOUT_S="1")
    # Whoever is first stays unanswered until it has come to another one too.
    pipeline.fault_point("worker.before_claim", "hold")
    with Celery("producer", broker=pipeline.settings["CELERY_BROKER_URL"]) as app:
        app.send_task(
            "tasks.charge",
            args=[key_of(event)],
            kwargs={"event": event_from_json(event).to_json(), "source": "nsq"},
            queue="charges",
            countdown=4,
        )
    workers = (pipeline.roles["worker"], other)
    started = f"charge_started charge_key={key_of(event)}"
    wait_until(
        lambda: sum(worker.log().count(started) for worker in workers) >= 2,
        SLACK_S,
        "the task was delivered more than once",
    )
    pipeline.fault_point.release("worker.before_claim")
    pipeline.charged_once(event)
    assert len(pipeline.creates(event)) == 1


@pytest.mark.timeout(900)
def test_celery_7950_workers_are_told_to_stop_again_and_again_while_events_flow(
    pipeline: Pipeline,
) -> None:
    events = [billing_event(f"celery_7950_{n}", amount_cents=100 + n) for n in range(FLOW)]
    pipeline.stripe.fault("latency", seconds=0.1, times=FLOW)
    for number, event in enumerate(events):
        pipeline.publish("nsq" if number % 2 else "redis", event)
    for charges in STOPS_AT:
        wait_until(
            lambda wanted=charges: len(pipeline.charges(*events)) >= wanted,  # type: ignore[misc]
            4 * SLACK_S,
            f"{charges} charges",
        )
        stop(pipeline.roles["worker"])
        pipeline.start("worker")
    pipeline.charged_once(*events, within_s=4 * SLACK_S)
    # A stop leaves no outcome unknown.
    assert all(len(pipeline.creates(event)) == 1 for event in events[::10])


def stop(worker: Role) -> None:
    """As a process manager does: SIGTERM, and SIGKILL when its patience is over."""
    worker.terminate()
    try:
        assert worker.wait_exit(STOP_GRACE_S) == 0
    except NeverHappenedError:
        # Celery's warm stop can hang in its pool when all tasks are done already.
        worker.kill()


@pytest.mark.timeout(600)
def test_celery_1564_stripe_python_726_each_child_has_connections_of_its_own(
    pipeline: Pipeline,
) -> None:
    events = [billing_event(f"celery_1564_{n}", amount_cents=100 + n) for n in range(100)]
    worker = pipeline.roles["worker"]
    earlier = len(worker.log())
    pipeline.publish("nsq", *events[::2])
    pipeline.publish("redis", *events[1::2])
    pipeline.charged_once(*events, within_s=4 * SLACK_S)
    assert [len(pipeline.creates(event)) for event in events[:10]] == [1] * 10
    # dj-stripe#2241: a task gives back a word, nothing of what Stripe returned.
    wait_until(
        lambda: all(f": '{key_of(event)} charged'" in worker.log()[earlier:] for event in events),
        SLACK_S,
        "Celery has told what each task gave back",
    )
    lines = worker.log()[earlier:].splitlines()
    # A Redis that only answers late is no sign of anything.
    log = "\n".join(line for line in lines if not LIMITER_TOO_SLOW.search(line))
    for sign in ("Traceback", "charge_failed", "alarm_", "Error"):
        assert sign not in log
    connections = pipeline.query(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND application_name = 'chargebridge-worker'"
    )
    assert connections[0][0] >= 4


@pytest.mark.parametrize(
    ("action", "sign"), [("hold", "why=time_limit"), ("freeze", "Hard time limit")]
)
def test_celery_9596_a_time_limit_strikes_when_stripe_has_charged_already(
    pipeline: Pipeline, action: str, sign: str
) -> None:
    """The soft limit for a task that still hears it, the hard limit for one that does not."""
    event = billing_event(f"celery_9596_{action}")
    worker = pipeline.roles["worker"]
    signs = worker.log().count(sign)
    pipeline.fault_point("worker.after_call", action)
    pipeline.publish("nsq", event)
    pipeline.fault_point.wait_reached("worker.after_call")
    wait_until(lambda: worker.log().count(sign) > signs, SLACK_S, "the task was ended")
    pipeline.charged_once(event, within_s=pipeline.limits.lease_s)
    # What the first call came to was never written: it was asked for again, with the same key.
    assert [request["replayed"] for request in pipeline.creates(event)] == [False, True]


def test_stripity_stripe_564_the_first_call_hangs_and_the_next_finds_its_key_in_use(
    pipeline: Pipeline,
) -> None:
    event = billing_event("stripity_564")
    pipeline.stripe.fault("latency", stage="after_claim", seconds=600.0)
    pipeline.publish("redis", event)
    wait_until(lambda: (409, False) in answers(pipeline, event), SLACK_S, "the key is in use")
    pipeline.stripe.release()
    wait_until(lambda: answers(pipeline, event)[0] == (200, False), SLACK_S, "the first one ends")
    clock.advance(pipeline.settings["DATABASE_URL"], pipeline.limits.backoff_cap_s)
    pipeline.charged_once(event, within_s=2 * pipeline.limits.call_s)
    assert answers(pipeline, event)[-1] == (200, True)


def answers(pipeline: Pipeline, event: Event) -> list[tuple[int | None, bool]]:
    """Status, and whether it was a replay, of each request for the event's money."""
    return [(one["status"], one["replayed"]) for one in pipeline.creates(event)]


@pytest.mark.parametrize(
    ("source", "kind", "stage"),
    [
        ("stripe_java_389", "reset", "after_commit"),
        ("chargebee_python_48_html", "html_502", "after_commit"),
        ("chargebee_python_48_truncated", "truncate", "after_commit"),
        ("chargebee_python_48_before", "html_502", "before"),
    ],
)
def test_an_answer_that_says_nothing_is_not_a_failure(
    pipeline: Pipeline, source: str, kind: str, stage: str
) -> None:
    event: Event = billing_event(source)
    pipeline.stripe.fault(kind, stage=stage, customer=event["stripe_customer_id"])
    pipeline.publish("nsq", event)
    pipeline.charged_once(event, within_s=pipeline.limits.backoff_cap_s)
    first, second = pipeline.creates(event)
    assert second["replayed"] is (stage == "after_commit")
    assert first["body_sha256"] == second["body_sha256"]


def test_stripe_php_355_the_key_goes_out_as_a_header_of_the_create_alone(
    pipeline: Pipeline,
) -> None:
    event = billing_event("stripe_php_355")
    seen = len(pipeline.stripe.requests())
    pipeline.publish("nsq", event)
    pipeline.charged_once(event)
    requests = pipeline.stripe.requests()[seen:]
    keys = {(one["method"], one["path"]): one["idempotency_key"] for one in requests}
    assert keys.pop(("POST", "/v1/payment_intents")) == key_of(event)
    assert set(keys.values()) <= {None}
    assert not any(key_of(event) in one["query"] for one in requests)
