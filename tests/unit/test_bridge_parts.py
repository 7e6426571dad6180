"""The parts of a bridge that need no broker: replies, names, addresses, parked deliveries."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from tornado.iostream import StreamClosedError

from bridges.addresses import check_nsq_names, check_redis_names
from bridges.backoff import LONGEST_S, Backoff
from bridges.commit_watcher import ParkedDeliveries, ParkedDelivery
from bridges.counters import Counters
from bridges.delivery import Delivery
from bridges.endings import end_all
from bridges.nsq import quieten_libraries
from bridges.redis_replies import (
    CURSOR_END,
    Entry,
    payload_of,
    read_claimed,
    read_group_reply,
    read_range,
    whole_entry,
)
from models.addresses import addresses, host_and_port
from models.errors import ConfigurationError, EventRefused
from models.limits import Limits


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def delivery(number: int) -> Delivery:
    return Delivery("redis", "s/g", f"{number}-0", f"{number}-0", b"")


# -- replies of Redis ------------------------------------------------------------------------


def test_a_claim_in_two_parts_is_read() -> None:
    claimed = read_claimed([b"5-0", [b"1-0", b"2-0"]])
    assert (claimed.cursor, claimed.ids, claimed.dropped) == (b"5-0", [b"1-0", b"2-0"], [])


def test_a_claim_in_three_parts_names_what_was_dropped() -> None:
    claimed = read_claimed([CURSOR_END, [b"1-0"], [b"2-0", b"3-0"]])
    assert (claimed.ids, claimed.dropped) == ([b"1-0"], [b"2-0", b"3-0"])


@pytest.mark.parametrize("ids", [None, [], [None], [[None, None]], [(None, None)]])
def test_a_claim_with_nothing_or_nil_entries_brings_no_ids(ids: object) -> None:
    assert read_claimed([CURSOR_END, ids]).ids == []
    assert read_claimed([CURSOR_END, ids, None]).ids == []


def test_a_claim_with_whole_entries_gives_their_ids() -> None:
    assert read_claimed([CURSOR_END, [[b"1-0", [b"payload", b"{}"]]]]).ids == [b"1-0"]


def test_a_read_without_anything_new_is_empty() -> None:
    assert read_group_reply(None) == []


def test_entries_keep_the_order_of_their_fields() -> None:
    reply = [[b"stream", [[b"1-0", [b"b", b"1", b"a", b"2"]]]]]
    assert read_group_reply(reply) == [Entry("1-0", [b"b", b"1", b"a", b"2"])]


@pytest.mark.parametrize("reply", [None, [], [None]])
def test_an_entry_that_cannot_be_read_any_more_was_trimmed(reply: list[None] | None) -> None:
    entry = read_range(b"1-0", reply)
    assert entry == Entry("1-0", None)
    with pytest.raises(EventRefused, match="payload_lost"):
        payload_of(entry, b"payload")


def test_the_payload_is_found_among_other_fields() -> None:
    assert payload_of(Entry("1-0", [b"x", b"payload", b"payload", b"{}"]), b"payload") == b"{}"


def test_a_payload_given_twice_is_refused_like_none_at_all() -> None:
    with pytest.raises(EventRefused, match="more than one field"):
        payload_of(Entry("1-0", [b"payload", b"1", b"payload", b"2"]), b"payload")
    with pytest.raises(EventRefused, match="no field"):
        payload_of(Entry("1-0", [b"Payload", b"1"]), b"payload")


def test_an_entry_is_kept_with_every_pair_and_every_byte() -> None:
    kept = json.loads(whole_entry(Entry("1-0", [b"a", b"1", b"a", b"\xff"])))
    assert kept == [["a", "1"], ["a", {"base64": "/w=="}]]


# -- names and addresses ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a b", "a#ephemeral", "x" * 65, "ä", "a/b"])
def test_names_that_nsqd_would_refuse_or_drop_messages_from_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^NSQ_CHANNEL: "):
        check_nsq_names("topic", name)
    with pytest.raises(ConfigurationError, match=r"^NSQ_TOPIC: "):
        check_nsq_names(name, "channel")


def test_ordinary_names_pass() -> None:
    check_nsq_names("billing-events", "stripe-processor")
    check_redis_names("{billing}:stream", "billing-group", "payload")


@pytest.mark.parametrize("name", ["", "a b", "a\n", "x" * 256])
def test_stream_names_with_blanks_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^REDIS_STREAM: "):
        check_redis_names(name, "group", "payload")


@pytest.mark.parametrize(
    "text",
    [
        "host",
        "host:",
        ":4150",
        "host:0",
        "host:65536",
        "host:x",
        "[::1",
        "[::1:1",
        "a..b:1",
        "a@b:1",
        "h:" + "9" * 5000,
    ],
)
def test_an_address_that_is_none_names_its_setting(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^NSQD_TCP_ADDRESS: "):
        host_and_port("NSQD_TCP_ADDRESS", text)


def test_several_addresses_are_separated_by_commas() -> None:
    assert addresses("NSQD_TCP_ADDRESS", "a:1, b:2,") == ["a:1", "b:2"]
    assert addresses("NSQD_TCP_ADDRESS", "") == []


# -- waiting -----------------------------------------------------------------------------------


def test_a_pause_ends_and_a_success_ends_all_pauses() -> None:
    clock = Clock()
    backoff = Backoff(Limits(), clock)
    assert backoff.ready
    pauses = [backoff.failed() for _ in range(50)]
    assert all(0 <= pause_s <= LONGEST_S for pause_s in pauses)
    clock.now += backoff.wait_s
    assert backoff.ready
    backoff.failed()
    backoff.worked()
    assert backoff.ready


def test_pauses_differ_from_bridge_to_bridge() -> None:
    assert len({Backoff(Limits()).failed() for _ in range(20)}) > 1


# -- parked deliveries ---------------------------------------------------------------------------


def test_no_more_are_parked_than_there_is_room_for() -> None:
    parked = ParkedDeliveries(limit=2)
    added = [parked.add(ParkedDelivery(delivery(n), f"key{n}")) for n in range(3)]
    assert added == [True, True, False]
    assert len(parked) == 2
    assert "2-0" not in parked


def test_parked_keys_are_asked_for_in_turn() -> None:
    parked = ParkedDeliveries()
    for number in range(5):
        parked.add(ParkedDelivery(delivery(number), f"key{number}"))
    turns = [[p.charge_key for p in parked.next_in_turn(2)] for _ in range(3)]
    assert turns == [["key0", "key1"], ["key2", "key3"], ["key4", "key0"]]
    parked.remove(parked.next_in_turn(4))
    assert [p.charge_key for p in parked.all()] == ["key0"]


def test_counts_are_shown_by_name() -> None:
    counters = Counters()
    counters.add("acked", 2)
    counters.add("acked")
    counters.add("parked", 0)
    assert counters.snapshot() == {"acked": 3}
    assert counters["parked"] == 0


def test_what_the_nsq_library_says_of_a_lost_connection_is_left_out_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    quieten_libraries()
    library = logging.getLogger("nsq.conn")
    for error in (StreamClosedError(), ValueError("a bug")):
        try:
            raise error
        except (StreamClosedError, ValueError):
            library.exception("uncaught exception in data event")
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ValueError]


def test_a_loop_that_loses_a_cancellation_ends_all_the_same() -> None:
    async def loop(begun: asyncio.Event, answer: asyncio.Future[None]) -> None:
        begun.set()
        await asyncio.wait_for(answer, 60)
        await asyncio.Event().wait()

    async def stopped_when_the_answer_comes() -> bool:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        begun = asyncio.Event()
        running = asyncio.create_task(loop(begun, answer))
        await begun.wait()
        answer.set_result(None)
        await asyncio.wait_for(end_all([running]), 30)
        return running.cancelled()

    assert asyncio.run(stopped_when_the_answer_comes())
