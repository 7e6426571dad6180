"""What has gone wrong for others with Redis Streams, tried on the whole product."""

from __future__ import annotations

import time
from urllib.parse import urlsplit

import redis

from sandbox.backlog import stream_unfinished
from tests.support.pipelines import SHORT_DELIVERIES, SLACK_S, Pipeline
from tests.support.producers import billing_event
from tests.support.proxy import Proxy
from tests.support.waiting import stays, wait_until

PIPELINE_ENV = SHORT_DELIVERIES
LINES_PER_S = 5


def test_faststream_2611_the_stream_is_emptied_under_a_running_bridge(pipeline: Pipeline) -> None:
    paid, fresh = billing_event("faststream_paid"), billing_event("faststream_fresh")
    pipeline.publish("redis", paid)
    pipeline.charged_once(paid)
    bridge = pipeline.roles["bridge-redis"]
    begun, before = time.monotonic(), bridge.log()
    lines, losses = before.count("\n"), before.count("stream_group_lost")
    with redis.Redis.from_url(pipeline.settings["REDIS_URL"]) as client:
        client.flushdb()
        wait_until(
            lambda: bridge.log().count("stream_group_lost") > losses, SLACK_S, "the loss is seen"
        )
        pipeline.publish("redis", paid, fresh)
    wait_until(lambda: pipeline.is_settled(fresh), SLACK_S, "charged through the new group")
    pipeline.charged_once(paid, fresh)
    stays(lambda: bridge.alive, 1.0, "the bridge runs on")
    assert bridge.log().count("\n") - lines < LINES_PER_S * (time.monotonic() - begun)
    assert len(pipeline.creates(paid)) == 1


def test_flightctl_2227_and_jac_7489_the_group_is_deleted(pipeline: Pipeline) -> None:
    paid = [billing_event(f"group_paid_{n}") for n in range(5)]
    fresh = [billing_event(f"group_fresh_{n}") for n in range(5)]
    pipeline.publish("redis", *paid)
    pipeline.charged_once(*paid)
    stream, group = pipeline.settings["REDIS_STREAM"], pipeline.settings["REDIS_GROUP"]
    with redis.Redis.from_url(pipeline.settings["REDIS_URL"]) as client:
        length = client.xlen(stream)
        assert client.xgroup_destroy(stream, group) == 1
        pipeline.publish("redis", *fresh)
        assert client.xlen(stream) == length + 5
        wait_until(lambda: client.xinfo_groups(stream), SLACK_S, "the group is there again")
    pipeline.charged_once(*paid, *fresh)
    assert [len(pipeline.creates(event)) for event in paid + fresh] == [1] * 10
    assert pipeline.stream_acked() == length + 5


def test_openlinker_2223_a_second_bridge_takes_over_what_the_first_had_only_read(
    pipeline: Pipeline,
) -> None:
    event = billing_event("openlinker")
    bridges = [pipeline.roles["bridge-redis"], pipeline.extra("bridge-redis")]
    pipeline.fault_point("bridge.before_publish", "kill")
    # The other one is held there, or it might be through before anybody looks.
    pipeline.fault_point("bridge.before_ack", "hold")
    pipeline.publish("redis", event)
    wait_until(lambda: sum(b.alive for b in bridges) == 1, SLACK_S, "one of the two is dead")
    assert stream_unfinished(pipeline.settings) == 1
    pipeline.fault_point.wait_reached("bridge.before_ack")
    assert stream_unfinished(pipeline.settings) == 1
    pipeline.fault_point.release("bridge.before_ack")
    pipeline.charged_once(event, within_s=pipeline.limits.min_idle_s)
    assert sum(bridge.alive for bridge in bridges) == 1
    assert len(pipeline.creates(event)) == 1


def test_redis_py_3554_one_reply_to_each_kind_of_write_is_lost(pipeline: Pipeline) -> None:
    event, body = billing_event("redis_py_3554"), b"no event, and its reply is lost"
    pipeline.kill("bridge-redis")
    names = ("DATABASE_URL", "REDIS_URL", "CELERY_BROKER_URL")
    with (
        proxy_of(pipeline, "DATABASE_URL") as ledger,
        proxy_of(pipeline, "REDIS_URL") as stream,
        proxy_of(pipeline, "CELERY_BROKER_URL") as queue,
    ):
        ledger.lose_reply_to = b"INSERT INTO dead_letters"
        stream.lose_reply_to = b"XACK"
        queue.lose_reply_to = b"LPUSH"
        ways = zip(names, (ledger, stream, queue), strict=True)
        env = {name: through(pipeline.settings[name], proxy) for name, proxy in ways}
        bridge = pipeline.extra("bridge-redis", **env)
        pipeline.publish("redis", event, body)
        pipeline.charged_once(event, within_s=pipeline.limits.redispatch_after_s)
        proxies = (ledger, stream, queue)
        # Redis has done what it was asked before the proxy notes that the reply is lost.
        wait_until(lambda: all(proxy.lost for proxy in proxies), SLACK_S, "each has lost one")
        assert [proxy.lost for proxy in proxies] == [1, 1, 1]
        assert bridge.alive
    letters = [letter for letter in pipeline.dead_letters() if letter.body_size == len(body)]
    assert [letter.reason for letter in letters] == ["invalid_json"]
    assert len(pipeline.creates(event)) == 1


def proxy_of(pipeline: Pipeline, name: str) -> Proxy:
    """A proxy in front of the service of this setting."""
    parts = urlsplit(pipeline.settings[name])
    assert parts.hostname is not None
    assert parts.port is not None
    return Proxy(parts.hostname, parts.port)


def through(url: str, proxy: Proxy) -> str:
    """The same URL by way of the proxy."""
    parts = urlsplit(url)
    return url.replace(f"{parts.hostname}:{parts.port}", f"127.0.0.1:{proxy.port}")
