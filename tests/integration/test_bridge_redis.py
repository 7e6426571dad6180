"""Faults of Redis Streams that others have met; a bridge of ours against the real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from time import monotonic
from urllib.parse import urlsplit

import pytest
from sqlalchemy import text
from sqlalchemy.engine import Engine

from bridges import redis_streams, stream_group
from bridges.bridge import Bridge
from models.dead_letters import DeadLetters
from models.events import event_from_json
from models.keys import charge_key
from models.ledger import Ledger, Retry
from models.settings import Settings, load_settings
from tests.support.bridges import RunningBridge, published_keys, wait_published
from tests.support.brokers import Stream, valkey, valkey_url
from tests.support.faults import FaultPoints
from tests.support.ledgers import claimed, new_record, outcome
from tests.support.pipelines import SLACK_S
from tests.support.producers import billing_event
from tests.support.proxy import Proxy
from tests.support.roles import RoleStarter
from tests.support.services import Services
from tests.support.waiting import stays, wait_until

__all__ = ["valkey", "valkey_url"]

Start = Callable[..., RunningBridge]
LIMITED = "limited"
TRIES_PER_S = 15
"""More than back-off allows, and far less than without any."""


@pytest.fixture
def stream(
    request: pytest.FixtureRequest,
    services: Services,
    database_url: str,
    celery_broker_url: str,
    fault_point: FaultPoints,
) -> Stream:
    """On Redis 6.2; some tests ask for the 7-like server as well."""
    server = getattr(request, "param", "redis_url")
    return Stream(
        {
            **services.stack.settings,
            "DATABASE_URL": database_url,
            "CELERY_BROKER_URL": celery_broker_url,
            "REDIS_URL": request.getfixturevalue(server),
            "FAULTS_DIR": str(fault_point.folder),
            "TOUCH_S": "0.4",
            "MIN_IDLE_S": "1.5",
            # Nothing is published again by itself.
            "REDISPATCH_AFTER_S": "600",
            "BACKOFF_BASE_S": "0.2",
            "BACKOFF_CAP_S": "0.5",
            "LIMITS_CHECK": "warn",
        }
    )


both_servers = pytest.mark.parametrize("stream", ["redis_url", "valkey_url"], indirect=True)


@pytest.fixture
def environment(stream: Stream) -> dict[str, str]:
    """What a started process is told."""
    return stream.environment


@pytest.fixture
def settings(stream: Stream) -> Settings:
    return load_settings(stream.environment)


@pytest.fixture
def start(stream: Stream) -> Iterator[Start]:
    with ExitStack() as stack:

        def start_one(**changes: str) -> RunningBridge:
            told = load_settings({**stream.environment, **changes})
            return stack.enter_context(RunningBridge(told, "redis"))

        yield start_one


def settle(ledger: Ledger, customer: str) -> None:
    claim = claimed(ledger, new_record(event_from_json(billing_event(customer))))
    ledger.record_outcome(claim, outcome(), Retry(1))


def is_ready(of: Bridge) -> bool:
    return of.source.ready


def key_of(customer: str) -> str:
    event = billing_event(customer)
    return charge_key(event["customer_id"], event["billing_period"])


def test_a_quiet_stream_is_no_fault_and_a_stop_is_answered_at_once(
    stream: Stream, role: RoleStarter
) -> None:
    bridge = role("bridge-redis")
    before = bridge.log()
    stays(lambda: bridge.alive and bridge.log() == before, 8.0, "a silent, steady loop")
    bridge.terminate()
    assert bridge.wait_exit(SLACK_S) == 0
    assert "not_readable" not in bridge.log()
    assert stream.consumers() == {}


@both_servers
def test_after_a_flush_the_group_is_made_again_at_the_beginning(
    stream: Stream, start: Start, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    bridge = start()
    stream.publish(billing_event("before"))
    wait_published(settings, 1)
    with stream.client() as client:
        client.flushdb()
    stream.publish(billing_event("flushed"))
    wait_published(settings, 2)
    assert published_keys(settings) == [key_of("before"), key_of("flushed")]
    assert bridge.count("group_lost") >= 1
    assert len(caplog.records) < 10


@both_servers
def test_after_a_lost_group_paid_entries_are_acked_and_new_ones_published(
    stream: Stream, start: Start, settings: Settings, ledger: Ledger
) -> None:
    bridge = start()
    for number in range(5):
        settle(ledger, f"paid_{number}")
        stream.publish(billing_event(f"paid_{number}"))
    bridge.wait_count("acked", 5)
    with stream.client() as client:
        client.xgroup_destroy(stream.stream, stream.group)
    for number in range(5):
        stream.publish(billing_event(f"new_{number}"))
    wait_published(settings, 5)
    assert set(published_keys(settings)) == {key_of(f"new_{n}") for n in range(5)}
    bridge.wait_count("acked", 10)
    for number in range(5):
        settle(ledger, f"new_{number}")
    wait_until(lambda: stream.unfinished() == 0, SLACK_S, "all acked")


@both_servers
def test_entries_of_a_bridge_that_was_killed_before_it_published_are_taken_over(
    stream: Stream, role: RoleStarter, start: Start, settings: Settings, fault_point: FaultPoints
) -> None:
    fault_point("bridge.before_publish", "kill")
    killed = role("bridge-redis")
    stream.publish(billing_event("orphan"))
    killed.wait_exit()
    assert published_keys(settings) == []
    assert stream.unfinished() == 1
    bridge = start()
    wait_published(settings, 1)
    assert published_keys(settings) == [key_of("orphan")]
    assert bridge.count("taken") == 1


@both_servers
def test_an_entry_that_was_trimmed_while_pending_becomes_a_dead_letter_and_is_acked(
    stream: Stream, role: RoleStarter, start: Start, engine: Engine, fault_point: FaultPoints
) -> None:
    fault_point("bridge.before_publish", "kill")
    killed = role("bridge-redis")
    stream.publish(billing_event("trimmed"))
    killed.wait_exit()
    with stream.client() as client:
        (entry_id,) = [entry for entry, _ in client.xrange(stream.stream)]
        client.xtrim(stream.stream, maxlen=0, approximate=False)
    bridge = start()
    bridge.wait_count("acked", 1)
    wait_until(lambda: stream.unfinished() == 0, SLACK_S, "acked")
    (letter,) = DeadLetters(engine).list(limit=10)
    assert (letter.reason, letter.delivery_id) == ("payload_lost", entry_id.decode())


def test_several_bridges_leave_an_entry_with_its_living_owner(
    stream: Stream,
    start: Start,
    settings: Settings,
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream.publish(billing_event("owned"))
    with monkeypatch.context() as patched:
        # A look of its own for what is left would take it anew, and so hide a lost lease.
        patched.setattr(redis_streams, "RECLAIM_EVERY_S", 600.0)
        owner = start(MIN_IDLE_S="2.8")
        wait_published(settings, 1)
    bridges = [owner, *(start(MIN_IDLE_S="2.8") for _ in range(2))]
    # Well beyond the lease and another bridge's next look for what is left.
    stays(lambda: [b.held for b in bridges] == [1, 0, 0], 6.0, "its owner keeps it")
    assert sum(b.count("taken") for b in bridges) == 1
    settle(ledger, "owned")
    wait_until(lambda: stream.unfinished() == 0, SLACK_S, "acked")
    # A bridge counts an ack when it has the reply.
    wait_until(lambda: any(b.count("acked") for b in bridges), SLACK_S, "the ack is counted")
    assert sum(b.count("acked") for b in bridges) == 1


@both_servers
def test_entries_left_pending_by_somebody_else_are_taken_over_page_by_page(
    stream: Stream, start: Start, ledger: Ledger
) -> None:
    for number in range(250):
        stream.publish(billing_event(f"left_{number}"))
        settle(ledger, f"left_{number}")
    with stream.client() as client:
        client.xreadgroup(stream.group, "gone", {stream.stream: ">"}, count=250)
    stream.publish(billing_event("left_0"))
    bridge = start(BRIDGE_MAX_IN_FLIGHT="20")
    bridge.wait_count("acked", 251, 60)
    wait_until(lambda: stream.unfinished() == 0, SLACK_S, "all acked")


def test_a_lost_reply_to_an_ack_is_asked_again_and_counts_once(
    stream: Stream, start: Start, settings: Settings, ledger: Ledger, engine: Engine
) -> None:
    parts = urlsplit(stream.environment["REDIS_URL"])
    assert parts.hostname is not None
    assert parts.port is not None
    with Proxy(parts.hostname, parts.port) as proxy:
        url = stream.environment["REDIS_URL"].replace(f":{parts.port}", f":{proxy.port}")
        bridge = start(REDIS_URL=url)
        settle(ledger, "acked")
        for command in (b"XACK", b"XREADGROUP", b"XAUTOCLAIM"):
            proxy.lost = 0
            proxy.lose_reply_to = command
            stream.publish(billing_event("acked"))
            stream.publish(b"not json")
            wait_until(lambda: proxy.lost, SLACK_S, "a reply is lost")
            wait_until(lambda: stream.unfinished() == 0, SLACK_S, "all acked")
        assert bridge.count("answer_failed") == 1
    assert [letter.count for letter in DeadLetters(engine).list(limit=10)] == [1, 1, 1]


def test_an_entry_without_the_payload_field_is_kept_whole(
    stream: Stream, start: Start, engine: Engine
) -> None:
    with stream.client() as client:
        client.xadd(stream.stream, {b"other": b"caf\xc3\xa9", b"raw": b"\xff\x00"})
    bridge = start()
    bridge.wait_count("acked", 1)
    (listed,) = DeadLetters(engine).list(limit=10)
    letter = DeadLetters(engine).show(listed.id)
    assert letter is not None
    assert letter.reason == "invalid_event"
    assert letter.body == b'[["other", "caf\\u00e9"], ["raw", {"base64": "/wA="}]]'


def test_an_entry_that_is_not_utf8_does_not_hold_up_the_others(
    stream: Stream, start: Start, settings: Settings, engine: Engine
) -> None:
    stream.publish(b"\xff\xfe")
    stream.publish(billing_event("behind"))
    bridge = start()
    bridge.wait_count("acked", 1)
    wait_published(settings, 1)
    assert [letter.reason for letter in DeadLetters(engine).list(limit=10)] == ["invalid_json"]


@both_servers
def test_a_consumer_is_removed_when_it_is_gone_for_long_and_nothing_is_pending_with_it(
    stream: Stream, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_group, "DEAD_CONSUMER_IDLE_S", 0.5)
    stream.publish(billing_event("kept"))
    with stream.client() as client:
        client.xreadgroup(stream.group, "with_pending", {stream.stream: ">"})
        client.xgroup_createconsumer(stream.stream, stream.group, "with_none")
    wait_until(lambda: stream.idle_s("with_none") > 0.6, SLACK_S, "both are idle")
    start(MIN_IDLE_S="600")
    wait_until(lambda: "with_none" not in stream.consumers(), SLACK_S, "removed")
    assert stream.consumers()["with_pending"] == 1


@both_servers
def test_only_what_every_group_has_acked_is_trimmed(
    stream: Stream,
    start: Start,
    settings: Settings,
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redis_streams, "TRIM_EVERY_S", 0.2)
    with stream.client() as client:
        client.config_set("stream-node-max-entries", 10)
        client.xgroup_create(stream.stream, "another", "0")
        for number in range(100):
            settle(ledger, f"trim_{number}")
            stream.publish(billing_event(f"trim_{number}"))
        kept = [entry.decode() for entry, _ in client.xrange(stream.stream)]
        bridge = start(STREAM_TRIM="yes")
        bridge.wait_count("acked", 100)
        stays(lambda: client.xlen(stream.stream) == 100, 1.0, "another group needs them")
        client.xreadgroup("another", "its", {stream.stream: ">"}, count=60)
        client.xack(stream.stream, "another", *kept[:40], *kept[50:60])
        wait_until(lambda: client.xlen(stream.stream) < 100, SLACK_S, "trimmed")
        stays(lambda: bool(client.xrange(stream.stream, kept[40], kept[40])), 0.5, "still pending")
        assert len(client.xrange(stream.stream, kept[40])) == 60
        assert client.xlen(stream.stream) <= 70
        # A bridge counts what it has the reply to.
        bridge.wait_count("trimmed", 1)
        assert bridge.count("trimmed") == 100 - client.xlen(stream.stream)


@both_servers
def test_nothing_is_trimmed_unasked(stream: Stream, start: Start, ledger: Ledger) -> None:
    settle(ledger, "kept")
    stream.publish(billing_event("kept"))
    start().wait_count("acked", 1)
    with stream.client() as client:
        stays(lambda: client.xlen(stream.stream) == 1, 1.0, "it stays")


def test_redis_away_is_waited_for(
    stream: Stream, start: Start, services: Services, settings: Settings
) -> None:
    bridge = start()
    stream.publish(billing_event("before"))
    wait_published(settings, 1)
    services.kill("redis")
    bridge.wait_count("read_failed", 2)
    services.heal()
    stream.publish(billing_event("after"))
    wait_until(lambda: key_of("after") in published_keys(settings), SLACK_S, "goes on")
    stays(lambda: bridge.held == 2, 2.0, "and what was held is still ours")


@pytest.fixture
def limited_url(stream: Stream) -> Iterator[str]:
    """A login of its own, whose rights a test can take away."""
    parts = urlsplit(stream.environment["REDIS_URL"])
    with stream.client() as client:
        client.execute_command("ACL", "SETUSER", LIMITED, "on", ">pw", "~*", "&*", "+@all")
        yield parts._replace(netloc=f"{LIMITED}:pw@{parts.netloc}").geturl()
        client.execute_command("ACL", "DELUSER", LIMITED)


def test_a_lost_group_that_cannot_be_made_again_is_a_source_that_is_not_ready(
    stream: Stream, start: Start, limited_url: str, settings: Settings
) -> None:
    bridge = start(REDIS_URL=limited_url)
    wait_until(lambda: bridge.call(is_ready), SLACK_S, "ready")
    begun = monotonic()
    with stream.client() as client:
        client.execute_command("ACL", "SETUSER", LIMITED, "-xgroup")
        client.xgroup_destroy(stream.stream, stream.group)
        stream.publish(billing_event("waits"))
        wait_until(lambda: not bridge.call(is_ready), SLACK_S, "it says so")
        stays(lambda: not bridge.call(is_ready), 3.0, "and goes on to say so")
        assert bridge.count("group_lost") < TRIES_PER_S * (monotonic() - begun)
        client.execute_command("ACL", "SETUSER", LIMITED, "+xgroup")
    wait_published(settings, 1)
    wait_until(lambda: bridge.call(is_ready), SLACK_S, "ready again")


def test_a_parked_entry_whose_record_is_lost_comes_round_again(
    start: Start, stream: Stream, settings: Settings, ledger: Ledger, engine: Engine
) -> None:
    """Guard: after a database restore, bridges that ran on must not keep it to themselves."""
    stream.publish(billing_event("restored"))
    bridge = start(PARK_AFTER_S="0.5")
    other = start(PARK_AFTER_S="0.5")
    wait_published(settings, 1)
    claimed(ledger, new_record(event_from_json(billing_event("restored"))))
    wait_until(lambda: bridge.count("parked") + other.count("parked") >= 1, SLACK_S, "parked")
    with engine.connect() as connection:
        connection.execute(text("DELETE FROM billing_records"))
    wait_published(settings, 2)
    settle(ledger, "restored")
    wait_until(lambda: stream.unfinished() == 0, SLACK_S, "acked")
    assert set(published_keys(settings)) == {key_of("restored")}
