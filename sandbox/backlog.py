"""What a broker has no ack for: waiting, delivered and not acked, or put off."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

import redis

from sandbox.health import get_json

LOOK_AGAIN_S: Final = 0.25
"""nsqd counts a message nowhere while it writes one that timed out back to its disk."""
WAITING: Final = ("depth", "in_flight_count", "deferred_count")
MOVES: Final = ("message_count", "requeue_count", "timeout_count")


def nsq_unfinished(settings: Mapping[str, str]) -> int:
    """Messages that wait in topic or channel, are in flight or deferred.

    None are left only if that is so twice and nothing moved meanwhile; else what moved counts.
    """
    unfinished, moves = _nsq_figures(settings)
    if unfinished:
        return unfinished
    time.sleep(LOOK_AGAIN_S)
    later, moves_later = _nsq_figures(settings)
    return later or abs(moves_later - moves)


def _nsq_figures(settings: Mapping[str, str]) -> tuple[int, int]:
    """What is unfinished, and a count of moves that grows with each."""
    topic_name, channel_name = settings["NSQ_TOPIC"], settings["NSQ_CHANNEL"]
    query = f"format=json&topic={quote(topic_name)}&include_clients=false&include_mem=false"
    stats = get_json(f"http://{settings['NSQD_HTTP_ADDRESS']}/stats?{query}")
    topic = _named(stats["topics"], "topic_name", topic_name)
    channel = _named(topic["channels"], "channel_name", channel_name)
    on_their_way = max(topic["depth"], topic["message_count"] - channel["message_count"])
    unfinished = on_their_way + sum(channel[name] for name in WAITING)
    return int(unfinished), int(sum(channel[name] for name in MOVES))


def _named(entries: list[dict[str, Any]], field: str, name: str) -> dict[str, Any]:
    found = [entry for entry in entries if entry[field] == name]
    if not found:
        raise LookupError(f"nsqd has no {field.removesuffix('_name')} {name}")
    return found[0]


def stream_unfinished(settings: Mapping[str, str]) -> int:
    """Entries that are delivered to the group and not acked, and those not even delivered."""
    stream, group = settings["REDIS_STREAM"], settings["REDIS_GROUP"]
    with redis.Redis.from_url(settings["REDIS_URL"], protocol=2) as client:
        groups = {found["name"]: found for found in client.xinfo_groups(stream)}
        found = groups[group.encode()]
        unread = client.xrange(stream, min=b"(" + found["last-delivered-id"])
    return int(found["pending"]) + len(unread)
