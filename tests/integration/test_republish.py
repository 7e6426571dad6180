"""What is republished reaches brokers that are more than one server."""

from __future__ import annotations

import json
import urllib.request

import pytest

from models.errors import ChargebridgeError
from models.settings import Settings, load_settings
from sandbox.ports import free_port
from tasks.republish import republish
from tests.support.redis_servers import Cluster, Server, Watched, redis_cluster, watched_redis
from tests.support.services import Services

__all__ = ["redis_cluster", "watched_redis"]

BODIES = [b'{"number": 1}', b'{"number": 2}']


def settings_of(services: Services, **changes: str) -> Settings:
    return load_settings({**services.stack.settings, **changes})


def entries(server: Server, stream: str) -> list[bytes]:
    with server.client() as client:
        return [fields[b"payload"] for _, fields in client.xrange(stream)]


def test_a_cluster_takes_them(services: Services, redis_cluster: Cluster) -> None:
    settings = settings_of(services, REDIS_URL=redis_cluster.url)
    assert republish(settings, "redis", BODIES) == 2
    assert entries(redis_cluster.owner(settings.redis_stream), settings.redis_stream) == BODIES


def test_the_master_that_sentinels_name_takes_them(
    services: Services, watched_redis: Watched
) -> None:
    settings = settings_of(services, REDIS_URL=watched_redis.url)
    assert republish(settings, "redis", BODIES) == 2
    assert entries(watched_redis.master(), settings.redis_stream) == BODIES


def test_a_cluster_that_is_away_is_named_in_one_line(services: Services) -> None:
    settings = settings_of(services, REDIS_URL=f"redis+cluster://:secret@127.0.0.1:{free_port()}")
    with pytest.raises(ChargebridgeError, match="redis did not take an event") as refused:
        republish(settings, "redis", BODIES)
    assert "secret" not in str(refused.value)


def test_of_several_nsqd_the_first_that_answers_takes_them(services: Services) -> None:
    services.need("nsqd")
    there = services.stack.settings["NSQD_HTTP_ADDRESS"]
    settings = settings_of(
        services,
        NSQD_HTTP_ADDRESS=f"127.0.0.1:{free_port()}, http://{there}",
        NSQ_TOPIC="republished-to-several",
    )
    assert republish(settings, "nsq", BODIES) == 2
    url = f"http://{there}/stats?format=json&topic={settings.nsq_topic}"
    with urllib.request.urlopen(url) as reply:
        (topic,) = json.load(reply)["topics"]
    assert topic["message_count"] == 2
