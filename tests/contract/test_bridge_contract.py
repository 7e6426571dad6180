"""One suite over both brokers: each delivery is answered once, and acked only after a commit."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.engine import Engine

from bridges import redis_streams
from models.dead_letters import DeadLetters
from models.events import event_from_json
from models.ledger import Ledger, Retry
from models.outcomes import OutcomeKind
from models.settings import Settings
from tests.support.bridge_contract import (
    Start,
    broker,
    dead_letters,
    key_of,
    settings,
    settle,
    start,
    wait_unfinished,
)
from tests.support.bridges import published, published_keys, wait_published
from tests.support.brokers import Broker, valkey, valkey_url
from tests.support.ledgers import claimed, new_record, outcome
from tests.support.pipelines import SLACK_S
from tests.support.producers import billing_event
from tests.support.waiting import stays, wait_until

__all__ = ["broker", "settings", "start", "valkey", "valkey_url"]


def test_an_event_is_published_and_acked_only_when_its_record_is_settled(
    broker: Broker, start: Start, settings: Settings, ledger: Ledger
) -> None:
    event = billing_event("a")
    bridge = start()
    broker.publish(event)
    wait_published(settings, 1)
    (task,) = published(settings)
    assert task["args"] == [key_of(event)]
    assert task["kwargs"] == {"event": event_from_json(event).to_json(), "source": broker.kind}
    assert task["headers"]["id"] == key_of(event)
    claim = claimed(ledger, new_record(event_from_json(event)))
    stays(lambda: broker.unfinished() == 1, 1.0, "not acked while the record says sent")
    ledger.record_outcome(claim, outcome(), Retry(1))
    bridge.wait_count("acked", 1)
    wait_unfinished(broker, 0)
    assert len(published(settings)) == 1


def test_a_commit_acks_its_own_delivery_and_no_other_that_is_held(
    broker: Broker, start: Start, settings: Settings, ledger: Ledger
) -> None:
    events = [billing_event(f"batch_{number}") for number in range(4)]
    bridge = start()
    for event in events:
        broker.publish(event)
    wait_published(settings, 4)

    def acked_alone(event: dict[str, Any], left: int) -> None:
        settle(ledger, event)
        wait_unfinished(broker, left)
        stays(lambda: broker.unfinished() == left, 0.3, "the others are not acked")

    acked_alone(events[2], left=3)
    acked_alone(events[0], left=2)
    acked_alone(events[3], left=1)
    acked_alone(events[1], left=0)
    bridge.wait_count("acked", 4)


def test_settled_repeats_are_acked_without_a_publication(
    broker: Broker, start: Start, settings: Settings, ledger: Ledger
) -> None:
    events = [billing_event(f"repeat_{n}") for n in range(30)]
    for event in events:
        settle(ledger, event)
        broker.publish(event)
        broker.publish(event)
    bridge = start(BRIDGE_MAX_IN_FLIGHT="8")
    bridge.wait_count("acked", 60)
    wait_unfinished(broker, 0)
    assert published(settings) == []


@pytest.mark.parametrize("kind", [OutcomeKind.CARD_DECLINED, OutcomeKind.REJECTED])
def test_a_known_failure_is_settled_too(
    broker: Broker, start: Start, ledger: Ledger, kind: OutcomeKind
) -> None:
    event = billing_event("declined")
    settle(ledger, event, kind)
    broker.publish(event)
    bridge = start()
    bridge.wait_count("acked", 1)
    wait_unfinished(broker, 0)


def test_a_repeat_that_is_held_at_the_same_time_is_published_once_and_acked_for_itself(
    broker: Broker, start: Start, settings: Settings, ledger: Ledger
) -> None:
    event = billing_event("twice")
    broker.publish(event)
    broker.publish(event)
    bridge = start()
    bridge.wait_count("taken", 2)
    wait_published(settings, 1)
    settle(ledger, event)
    bridge.wait_count("acked", 2)
    wait_unfinished(broker, 0)
    assert published_keys(settings) == [key_of(event)]


def test_what_is_no_event_becomes_a_dead_letter_and_is_acked(
    broker: Broker, start: Start, settings: Settings, engine: Engine
) -> None:
    broken = [b"not json", b'{"customer_id": "a"}', b"x" * (256 * 1024 + 1)]
    for body in broken:
        broker.publish(body)
    bridge = start()
    bridge.wait_count("acked", 3)
    wait_unfinished(broker, 0)
    letters = dead_letters(engine)
    assert {letter.reason for letter in letters} == {"invalid_json", "invalid_event", "too_large"}
    assert {letter.source for letter in letters} == {broker.kind}
    bodies = [DeadLetters(engine).show(letter.id) for letter in letters]
    assert {b.body for b in bodies if b is not None} == set(broken)
    assert published(settings) == []


def test_without_a_committed_dead_letter_there_is_no_ack(
    broker: Broker, start: Start, engine: Engine
) -> None:
    bridge = start()
    with engine.connect() as other, other.execution_options(isolation_level="READ COMMITTED"):
        other.execute(text("LOCK TABLE dead_letters"))
        broker.publish(b"not json")
        bridge.wait_count("taken", 1)
        # The insert gives up after its lock timeout, again and again.
        stays(lambda: broker.unfinished() == 1 and not bridge.count("acked"), 3.0, "held")
        other.rollback()
    bridge.wait_count("acked", 1)
    assert [letter.reason for letter in dead_letters(engine)] == ["invalid_json"]
    wait_unfinished(broker, 0)


def test_other_money_fields_under_the_same_key_become_a_payload_conflict(
    broker: Broker, start: Start, ledger: Ledger, engine: Engine, settings: Settings
) -> None:
    first = billing_event("conflict")
    settle(ledger, first)
    broker.publish({**first, "amount_cents": 9999})
    bridge = start()
    bridge.wait_count("acked", 1)
    wait_unfinished(broker, 0)
    (letter,) = dead_letters(engine)
    assert (letter.reason, letter.charge_key) == ("payload_conflict", key_of(first))
    assert published(settings) == []


def test_a_conflict_between_two_held_deliveries_is_found_when_the_first_is_recorded(
    broker: Broker, start: Start, ledger: Ledger, engine: Engine, settings: Settings
) -> None:
    first = billing_event("race")
    broker.publish(first)
    broker.publish({**first, "amount_cents": 9999})
    bridge = start()
    bridge.wait_count("taken", 2)
    wait_published(settings, 1)
    claim = claimed(ledger, new_record(event_from_json(first)))
    bridge.wait_count("acked", 1)
    assert [letter.reason for letter in dead_letters(engine)] == ["payload_conflict"]
    assert bridge.held == 1
    ledger.record_outcome(claim, outcome(), Retry(1))
    bridge.wait_count("acked", 2)


def test_leases_are_extended_for_as_long_as_a_delivery_is_held(
    broker: Broker, start: Start, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = {"MSG_TIMEOUT_S": "2.8", "MIN_IDLE_S": "2.8"}
    broker.publish(billing_event("slow"))
    with monkeypatch.context() as patched:
        # A look of its own for what is left would take it anew, and so hide a lost lease.
        patched.setattr(redis_streams, "RECLAIM_EVERY_S", 600.0)
        first = start(**lease)
        wait_published(settings, 1)
    second = start(**lease)
    # Well beyond the lease and the second bridge's next look for what is left.
    stays(lambda: first.held == 1 and second.held == 0, 6.0, "the first bridge keeps it")
    assert first.count("taken") == 1
    assert first.count("ownership_lost") == 0
    assert second.count("taken") == 0


def test_a_record_that_stays_unsettled_is_parked_and_acked_once_it_settles(
    broker: Broker, start: Start, settings: Settings, ledger: Ledger
) -> None:
    event = billing_event("parked")
    broker.publish(event)
    # The stream brings a parked entry again after MIN_IDLE_S, nsqd after PARK_DELAY_S.
    bridge = start(PARK_AFTER_S="0.5", BRIDGE_MAX_IN_FLIGHT="1", MIN_IDLE_S="1.5")
    wait_published(settings, 1)
    claim = claimed(ledger, new_record(event_from_json(event)))
    bridge.wait_count("parked", 1)
    assert bridge.count("acked") == 0
    wait_unfinished(broker, 1)
    other = billing_event("passes_by")
    settle(ledger, other)
    broker.publish(other)
    bridge.wait_count("acked", 1)
    # It goes round again and again, and is never published for its row.
    stays(lambda: bridge.count("acked") == 1, 2.5, "parked and not acked")
    ledger.record_outcome(claim, outcome(), Retry(1))
    bridge.wait_count("acked", 2)
    wait_unfinished(broker, 0)
    assert published_keys(settings) == [key_of(event)]


def test_an_event_without_a_record_is_published_again_with_another_task_id(
    broker: Broker, start: Start, settings: Settings
) -> None:
    event = billing_event("again")
    broker.publish(event)
    start(REDISPATCH_AFTER_S="0.5")
    wait_published(settings, 3)
    tasks = published(settings)
    ids = [task["headers"]["id"] for task in tasks]
    assert ids[0] == key_of(event)
    assert len(set(ids)) == len(ids)
    assert {task["args"][0] for task in tasks} == {key_of(event)}


def test_what_is_shown_of_a_task_hides_the_event(
    broker: Broker, start: Start, settings: Settings
) -> None:
    broker.publish(billing_event("hidden", description="marker-of-a-secret"))
    start()
    wait_published(settings, 1)
    headers = published(settings)[0]["headers"]
    assert "marker-of-a-secret" not in json.dumps(headers)
    assert "cus_hidden" not in json.dumps(headers)


def test_a_delivery_of_a_later_round_is_parked_at_once_while_its_record_is_unsettled(
    broker: Broker, start: Start, settings: Settings, ledger: Ledger
) -> None:
    event = billing_event("later_round")
    broker.publish(event)
    first = start()
    first.wait_count("taken", 1)
    first.stop()
    claim = claimed(ledger, new_record(event_from_json(event)))
    second = start(PARK_AFTER_S="600")
    second.wait_count("parked", 1)
    # It may just have come round again, only to be parked again.
    wait_until(lambda: second.held == 0, SLACK_S, "no slot is taken")
    ledger.record_outcome(claim, outcome(), Retry(1))
    second.wait_count("acked", 1)
    wait_unfinished(broker, 0)


def test_a_repeat_with_another_event_id_is_counted_and_logged_by_its_hash(
    broker: Broker, start: Start, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    first = billing_event("said_twice", event_id="marker-one")
    settle(ledger, first)
    bridge = start()
    broker.publish(first)
    bridge.wait_count("acked", 1)
    assert bridge.count("repeat_other_event_id") == 0
    other = {"event_id": "marker-two", "description": "other", "payment_method": "pm_other"}
    broker.publish({**first, **other})
    bridge.wait_count("acked", 2)
    names = ("event_id", "description", "payment_method", "billing_run")
    assert [bridge.count(f"repeat_other_{name}") for name in names] == [1, 1, 1, 0]
    (line,) = [r for r in caplog.records if r.message == "repeat_with_another_event_id"]
    shown = vars(line)
    assert shown["event_id_sha256"] == sha256(b"marker-two").hexdigest()[:16]
    assert shown["first_event_id_sha256"] == sha256(b"marker-one").hexdigest()[:16]
    assert "marker-" not in str({k: v for k, v in shown.items() if k != "taskName"})
    wait_unfinished(broker, 0)
