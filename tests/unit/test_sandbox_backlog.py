"""What counts as unfinished at nsqd, from figures such as it gives."""

from __future__ import annotations

from typing import Any

import pytest

from sandbox.backlog import nsq_unfinished
from tests.unit.scripted_server import ScriptedServer, reply, serving

EMPTY = {"depth": 0, "in_flight_count": 0, "deferred_count": 0}


def stats(waiting_in_topic: int = 0, timeouts: int = 3, **figures: int) -> dict[str, Any]:
    channel = {
        "channel_name": "bridge",
        "message_count": 7,
        "requeue_count": 0,
        "timeout_count": timeouts,
        **EMPTY,
        **figures,
    }
    topic = {
        "topic_name": "billing",
        "depth": waiting_in_topic,
        "message_count": 7,
        "channels": [channel],
    }
    return {"topics": [topic]}


def count(server: ScriptedServer) -> int:
    address = server.url.removeprefix("http://")
    names = {"NSQ_TOPIC": "billing", "NSQ_CHANNEL": "bridge"}
    return nsq_unfinished({"NSQD_HTTP_ADDRESS": address, **names})


@pytest.mark.parametrize(
    ("answers", "unfinished"),
    [
        ([stats()], 0),
        ([stats(depth=2, in_flight_count=1)], 3),
        ([stats(deferred_count=1)], 1),
        ([stats(waiting_in_topic=4)], 4),
        # A message that has timed out is counted nowhere until the disk has it.
        ([stats(), stats(depth=1)], 1),
        ([stats(), stats(timeouts=4)], 1),
    ],
)
def test_nothing_is_left_only_if_it_stays_so(answers: list[Any], unfinished: int) -> None:
    with serving(*(reply(200, answer, Connection="close") for answer in answers)) as server:
        assert count(server) == unfinished


def test_a_channel_that_is_not_there_is_no_empty_one() -> None:
    with (
        serving(reply(200, {"topics": []}, Connection="close")) as server,
        pytest.raises(LookupError),
    ):
        count(server)
