"""Every body of tests/cases/events.jsonl through the whole product, once on each broker."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import urllib3

from models.states import is_settled
from sandbox.health import get_json
from tests.support.pipelines import SLACK_S, Event, Pipeline, key_of
from tests.support.services import Services
from tests.support.waiting import wait_until

CASES: list[dict[str, Any]] = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "cases" / "events.jsonl")
    .read_text("utf-8")
    .splitlines()
]
COMMON = ("worker", "worker-control", "beat")


def body_of(case: Mapping[str, Any]) -> bytes:
    if "body_base64" in case:
        return base64.b64decode(case["body_base64"])
    return str(case["body"]).encode()


@dataclass
class Progress:
    """What the ledger and Stripe should hold after the cases so far."""

    broker: str
    charged: dict[str, Event] = field(default_factory=dict)
    buried: list[str] = field(default_factory=list)
    requests: int = 0


@pytest.fixture(params=["nsq", "redis"])
def fresh(
    request: pytest.FixtureRequest, services: Services, tmp_path: Path
) -> Iterator[tuple[Pipeline, str]]:
    """A pipeline with an empty ledger, one bridge, and the name of its broker."""
    broker = request.param
    pipeline = Pipeline(services, tmp_path, (*COMMON, f"bridge-{broker}"))
    yield pipeline, broker
    pipeline.end()


def test_each_body_gets_what_it_is_to_get(fresh: tuple[Pipeline, str]) -> None:
    pipeline, broker = fresh
    progress = Progress(broker)
    for case in CASES:
        if broker == "nsq" and not body_of(case):
            # nsqd takes no empty message: such a body cannot arrive on NSQ.
            with pytest.raises(urllib3.exceptions.HTTPError, match="400"):
                pipeline.publish(broker, b"")
            continue
        check(pipeline, progress, case)
    wait_until(lambda: pipeline.unfinished() == 0, SLACK_S, "all is acked")
    pipeline.charged_once(*progress.charged.values())
    assert len(pipeline.stripe.charges()) == len(progress.charged)
    assert [letter.reason for letter in pipeline.dead_letters()] == progress.buried


def check(pipeline: Pipeline, progress: Progress, case: Mapping[str, Any]) -> None:
    """Publish one body, wait for its answer, and hold everything against what is expected."""
    body, expected = body_of(case), str(case["expect"])
    acks = acked(pipeline, progress.broker)
    pipeline.publish(progress.broker, body)
    wait_until(
        lambda: acked(pipeline, progress.broker) > acks,
        SLACK_S,
        f"{case['name']}: answered",
    )
    # The ack has been sent: whatever had to be committed before it is there by now.
    if expected == "charge":
        event = json.loads(body)
        record = pipeline.record(event)
        assert record is not None, case["name"]
        assert (record.state, record.error_code) == ("charged", None), case["name"]
        (charge,) = pipeline.charges(event)
        found = (charge["amount"], charge["currency"])
        assert found == (case["amount_cents"], case["currency"]), case["name"]
        progress.charged[case["name"]] = event
        progress.requests += 1
    elif expected == "dead_letter":
        progress.buried.append(case["reason"])
    elif expected.startswith("settled:"):
        event = json.loads(body)
        record = pipeline.record(event)
        assert record is not None, case["name"]
        wanted = (expected.removeprefix("settled:"), case["error_code"])
        assert (record.state, record.error_code) == wanted, case["name"]
        assert is_settled(record.state)
        progress.requests += len(pipeline.creates(event))
    else:
        first = expected.removeprefix("repeat_of:")
        assert key_of(json.loads(body)) == key_of(progress.charged[first]), case["name"]
    letters = pipeline.dead_letters()
    assert [letter.reason for letter in letters] == progress.buried, case["name"]
    assert len(pipeline.stripe.creates()) == progress.requests, case["name"]
    assert len(pipeline.stripe.charges()) == len(progress.charged), case["name"]


def acked(pipeline: Pipeline, broker: str) -> int:
    """How many deliveries this broker has been told are done."""
    if broker == "redis":
        return pipeline.stream_acked()
    settings = pipeline.settings
    query = f"format=json&topic={settings['NSQ_TOPIC']}&include_mem=false"
    stats = get_json(f"http://{settings['NSQD_HTTP_ADDRESS']}/stats?{query}")
    (channel,) = stats["topics"][0]["channels"]
    return sum(client["finish_count"] for client in channel["clients"])
