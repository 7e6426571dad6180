"""Faults of nsqd and around it that others have met; a bridge of ours against the real one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from bridges import bridge as bridges_bridge
from bridges import nsq_source
from bridges.bridge import Bridge
from bridges.dispatcher import Publisher
from models.events import event_from_json
from models.ledger import Ledger, Retry
from models.settings import load_settings
from sandbox.ports import free_port
from tests.support.bridges import (
    SOON_S,
    RequeuesInARow,
    Start,
    metric,
    published_keys,
    start,
    task_ids,
    wait_published,
)
from tests.support.brokers import Nsq
from tests.support.ledgers import claimed, new_record, outcome
from tests.support.nsq_environment import environment
from tests.support.pipelines import key_of
from tests.support.producers import billing_event
from tests.support.proxy import Proxy
from tests.support.roles import RoleStarter
from tests.support.services import Services
from tests.support.waiting import stays, wait_until

__all__ = ["environment", "start"]

ANSWERS = ("acked", "parked", "handed_back", "requeued_before_timeout", "overflow")


def test_a_message_that_comes_more_than_five_times_is_not_given_up_while_the_ledger_is_away(
    environment: dict[str, str],
    another_nsqd: Callable[..., dict[str, str]],
    services: Services,
    start: Start,
    ledger: Ledger,
) -> None:
    nsq = Nsq({**environment, **another_nsqd("--max-msg-timeout=1s")})
    bridge = start(nsq.environment, MSG_TIMEOUT_S="1", TOUCH_S="0.3")
    services.kill("postgres")
    event = billing_event("patience")
    nsq.publish(event)
    bridge.wait_count("taken", 7, 45)
    assert bridge.count("acked") == 0
    channel = nsq.channel()
    # A bridge that stands still for a moment loses one to its timeout: it comes again as well.
    assert channel["requeue_count"] + channel["timeout_count"] >= 6
    services.heal()
    wait_published(bridge.settings, 1)
    claim = claimed(ledger, new_record(event_from_json(event)))
    ledger.record_outcome(claim, outcome(), Retry(1))
    bridge.wait_count("acked", 1)
    wait_until(lambda: nsq.unfinished() == 0, SOON_S, "acked")


def test_touching_ends_before_the_servers_own_maximum_and_one_finish_follows(
    environment: dict[str, str],
    another_nsqd: Callable[..., dict[str, str]],
    start: Start,
    ledger: Ledger,
) -> None:
    nsq = Nsq({**environment, **another_nsqd("--max-msg-timeout=2s")})
    delays = {"PARK_DELAY_S": "1", "REDISPATCH_AFTER_S": "60"}
    bridge = start(nsq.environment, MSG_TIMEOUT_S="12", TOUCH_S="3", **delays)
    event = billing_event("long")
    nsq.publish(event)
    wait_published(bridge.settings, 1)
    wait_until(RequeuesInARow(nsq.channel, 2), SOON_S, "requeued in time, round after round")
    assert bridge.count("requeued_before_timeout") >= 2
    claim = claimed(ledger, new_record(event_from_json(event)))
    ledger.record_outcome(claim, outcome(), Retry(1))
    bridge.wait_count("acked", 1)
    wait_until(lambda: nsq.unfinished() == 0, SOON_S, "acked")
    # What was requeued is not given to a worker again before its time: under another id.
    assert task_ids(bridge.settings) == {key_of(event)}


def test_a_message_timeout_above_the_servers_maximum_does_not_lock_the_bridge_out(
    environment: dict[str, str], another_nsqd: Callable[..., dict[str, str]], start: Start
) -> None:
    nsq = Nsq({**environment, **another_nsqd("--max-msg-timeout=3s", "--msg-timeout=3s")})
    bridge = start(nsq.environment, MSG_TIMEOUT_S="60")
    nsq.publish(billing_event("timeout"))
    bridge.wait_count("taken", 1)
    assert bridge.count("E_BAD_BODY") <= 1


def test_a_delay_above_the_servers_maximum_is_cut_and_the_connection_stays(
    environment: dict[str, str],
    another_nsqd: Callable[..., dict[str, str]],
    start: Start,
    ledger: Ledger,
) -> None:
    nsq = Nsq({**environment, **another_nsqd("--max-req-timeout=1s")})
    bridge = start(nsq.environment, PARK_AFTER_S="0.2", PARK_DELAY_S="100")
    event = billing_event("delay")
    nsq.publish(event)
    bridge.wait_count("taken", 1)
    claimed(ledger, new_record(event_from_json(event)))
    bridge.wait_count("parked", 2)
    assert bridge.count("connected") == 1
    assert bridge.count("connection_lost") == 0


def test_a_finish_after_the_message_timed_out_does_no_harm(
    environment: dict[str, str],
    another_nsqd: Callable[..., dict[str, str]],
    role: RoleStarter,
    ledger: Ledger,
) -> None:
    environment |= another_nsqd("--msg-timeout=1s")
    nsq = Nsq(environment)
    bridge = role(
        "bridge-nsq",
        NSQD_TCP_ADDRESS=environment["NSQD_TCP_ADDRESS"],
        NSQD_HTTP_ADDRESS=environment["NSQD_HTTP_ADDRESS"],
        NSQ_LOOKUPD_HTTP_ADDRESS="",
        MSG_TIMEOUT_S="1",
        TOUCH_S="0.3",
    )
    event = billing_event("late")
    nsq.publish(event)
    wait_published(load_settings(environment), 1)
    bridge.freeze()
    wait_until(lambda: nsq.channel()["timeout_count"] >= 1, SOON_S, "the message times out")
    claim = claimed(ledger, new_record(event_from_json(event)))
    ledger.record_outcome(claim, outcome(), Retry(1))
    bridge.thaw()
    wait_until(lambda: nsq.unfinished() == 0, SOON_S, "the newest message object was finished")
    other = billing_event("after")
    nsq.publish(other)
    settings = load_settings(environment)
    wait_until(lambda: key_of(other) in published_keys(settings), SOON_S, "the next one goes on")
    bridge.terminate()
    assert bridge.wait_exit() == 0
    assert "Traceback" not in bridge.log()


def test_the_reader_answers_heartbeats_while_the_task_queue_is_frozen(
    environment: dict[str, str],
    services: Services,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nsq = Nsq(environment)
    at_the_queue = threading.Event()
    depth = Publisher.depth

    def told(self: Publisher) -> int:
        at_the_queue.set()
        try:
            return depth(self)
        finally:
            at_the_queue.clear()

    # What a publication asks the task queue first.
    monkeypatch.setattr(Publisher, "depth", told)
    bridge = start(environment)
    services.freeze("redis")
    nsq.publish(billing_event("frozen"))
    wait_until(
        lambda: bridge.call(lambda _bridge: at_the_queue.is_set()),
        SOON_S,
        "the loop comes round while a publication hangs",
    )
    bridge.wait_count("publish_failed", 2)
    assert bridge.count("connection_lost") == 0
    services.thaw("redis")
    wait_published(bridge.settings, 1)


def test_a_restarted_nsqd_is_found_again_soon_and_its_messages_are_taken(
    environment: dict[str, str], services: Services, start: Start, ledger: Ledger
) -> None:
    nsq = Nsq(environment)
    bridge = start(environment)
    event = billing_event("restart")
    nsq.publish(event)
    wait_published(bridge.settings, 1)
    services.stop("nsqd")
    bridge.wait_count("connection_lost", 1)
    services.heal()
    # Long before the library itself would try: 15 s after each close.
    bridge.wait_count("connected", 2, 12)
    claim = claimed(ledger, new_record(event_from_json(event)))
    ledger.record_outcome(claim, outcome(), Retry(1))
    wait_until(lambda: nsq.unfinished() == 0, SOON_S, "acked when it came again")


def test_an_event_that_a_killed_nsqd_has_lost_is_published_from_memory(
    environment: dict[str, str], services: Services, start: Start
) -> None:
    nsq = Nsq(environment)
    services.freeze("redis")
    bridge = start(environment)
    event = billing_event("only_copy")
    nsq.publish(event)
    bridge.wait_count("taken", 1)
    services.kill("nsqd")
    bridge.wait_count("connection_lost", 1)
    services.heal()
    wait_published(bridge.settings, 1)
    assert len(set(published_keys(bridge.settings))) == 1


def test_no_more_is_held_than_was_allowed_and_each_message_gets_one_answer(
    environment: dict[str, str], start: Start, ledger: Ledger
) -> None:
    nsq = Nsq(environment)
    events = [billing_event(f"bound_{n}") for n in range(12)]
    for event in events:
        nsq.publish(event)
    bridge = start(environment, BRIDGE_MAX_IN_FLIGHT="5")
    bridge.wait_count("taken", 5)
    stays(lambda: bridge.held <= 5, 1.0, "the bound holds")
    for event in events:
        claim = claimed(ledger, new_record(event_from_json(event)))
        ledger.record_outcome(claim, outcome(), Retry(1))
    bridge.wait_count("acked", 12)
    wait_until(lambda: nsq.unfinished() == 0, SOON_S, "acked")
    bridge.stop()
    assert sum(bridge.count(name) for name in ANSWERS) == bridge.count("taken") == 12


def test_a_stopped_bridge_leaves_no_message_behind_on_the_way(
    environment: dict[str, str], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is on the way comes after a while only, and later still on a busy machine.
    monkeypatch.setattr(nsq_source, "QUIET_S", 3.0)
    monkeypatch.setattr(nsq_source, "DRAIN_LIMIT_S", 20.0)
    monkeypatch.setattr(bridges_bridge, "SHUTDOWN_GRACE_S", 0.0)
    nsq = Nsq(environment)
    for number in range(200):
        nsq.publish(billing_event(f"way_{number}"))
    long = {"BRIDGE_MAX_IN_FLIGHT": "50", "MSG_TIMEOUT_S": "60", "TOUCH_S": "20"}
    host, _, port = environment["NSQD_TCP_ADDRESS"].rpartition(":")
    with Proxy(host, int(port)) as proxy:
        proxy.delay_s = 0.4
        bridge = start(environment, **long, NSQD_TCP_ADDRESS=f"127.0.0.1:{proxy.port}")
        # The others are on the way.
        bridge.wait_count("taken", 1)
        bridge.stop()
    # Long before their message timeout.
    wait_until(lambda: at_rest(nsq.channel()) == (200, 0, 0), 30, "all wait for another bridge")


def at_rest(channel: dict[str, Any]) -> tuple[int, int, int]:
    """Messages that wait, messages in flight, consumers."""
    return channel["depth"], channel["in_flight_count"], channel["client_count"]


def test_an_nsqd_that_was_asked_for_nothing_is_asked_again(
    environment: dict[str, str], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nsq_source, "WATCH_EVERY_S", 0.3)
    nsq = Nsq(environment)
    bridge = start({**environment, "NSQ_LOOKUPD_HTTP_ADDRESS": ""})
    bridge.wait_count("connected", 1)

    def forget(of: Bridge) -> None:
        reader = of.source._reader  # type: ignore[attr-defined]  # as a slip of the library would
        for conn in reader.conns.values():
            reader._send_rdy(conn, 0)

    bridge.call(forget)
    nsq.publish(billing_event("stuck"))
    bridge.wait_count("taken", 1)
    assert bridge.count("rdy_restored") >= 1


def test_answers_that_meet_the_end_of_their_connection_are_given_by_the_next_one(
    environment: dict[str, str], start: Start, ledger: Ledger
) -> None:
    nsq = Nsq(environment)
    # nsqd waits for the message timeout, also where the connection has gone.
    bridge = start(environment, MSG_TIMEOUT_S="3", TOUCH_S="0.9")
    events = [billing_event(f"cut_{number}") for number in range(3)]
    for event in events:
        nsq.publish(event)
    wait_published(bridge.settings, 3)

    async def answer_as_it_ends(of: Bridge) -> None:
        reader = of.source._reader  # type: ignore[attr-defined]  # as a network would end it
        for conn in reader.conns.values():
            conn.stream.close()
        await of.source.ack([held.delivery for held in of.held])

    bridge.await_(answer_as_it_ends)
    bridge.wait_count("connected", 2)
    for event in events:
        claim = claimed(ledger, new_record(event_from_json(event)))
        ledger.record_outcome(claim, outcome(), Retry(1))
    wait_until(lambda: nsq.unfinished() == 0, SOON_S, "acked")


def test_lookupd_alone_is_enough_to_find_nsqd(environment: dict[str, str], start: Start) -> None:
    nsq = Nsq(environment)
    bridge = start(environment, NSQD_TCP_ADDRESS="")
    nsq.publish(billing_event("looked_up"))
    bridge.wait_count("taken", 1)


def test_several_nsqd_are_read_and_one_that_goes_away_stops_nothing(
    environment: dict[str, str],
    another_nsqd: Callable[..., dict[str, str]],
    services: Services,
    start: Start,
) -> None:
    other = another_nsqd()
    both = {
        name: f"{environment[name]},{other[name]}"
        for name in ("NSQD_TCP_ADDRESS", "NSQD_HTTP_ADDRESS")
    }
    first, second = Nsq(environment), Nsq({**environment, **other})
    bridge = start({**environment, "NSQ_LOOKUPD_HTTP_ADDRESS": ""}, **both)
    first.publish(billing_event("at_first"))
    second.publish(billing_event("at_second"))
    bridge.wait_count("taken", 2)
    services.kill("nsqd")
    bridge.wait_count("connection_lost", 1)
    second.publish(billing_event("later"))
    bridge.wait_count("taken", 3)


def test_a_frozen_ledger_does_not_keep_a_bridge_from_ending(
    environment: dict[str, str], services: Services, role: RoleStarter
) -> None:
    nsq = Nsq(environment)
    probes = f"127.0.0.1:{free_port()}"
    bridge = role("bridge-nsq", MSG_TIMEOUT_S="60", TOUCH_S="20", BRIDGE_HEALTH_LISTEN=probes)
    services.freeze("postgres")
    nsq.publish(billing_event("frozen"))
    wait_until(lambda: metric(probes, "in_flight") == 1, SOON_S, "held")
    bridge.terminate()
    # A question that nobody hurries is given up after 12 s.
    assert bridge.wait_exit(11) == 0
    assert "handed_back" in bridge.log()
    # Long before its message timeout.
    wait_until(lambda: nsq.channel()["depth"] == 1, 30, "handed back at once")
