"""What people do to records: once per request, from known states only, and in the audit."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import Engine, text

from models import ledger_actions
from models.dead_letters import DeadLetters, NewDeadLetter
from models.deployment import pin_deployment
from models.errors import DeadLetterReason, NotFound, StateForbids
from models.events import BillingEvent
from models.keys import charge_key
from models.ledger import Ledger, Retry
from models.ledger_actions import BATCH, ChargedRow, ImportConflict, LedgerActions
from models.ledger_reads import LedgerReads
from models.limits import FAST_LIMITS
from models.outcomes import OutcomeKind
from models.records import Record
from models.states import KNOWN_FAILURES, State
from sandbox import clock
from tests.support.ledgers import at_once, claimed, event, new_record, outcome, request, reread

NOW = Retry(0.0)
ALL_KINDS = {
    State.CHARGED: OutcomeKind.CHARGED,
    State.PROCESSING: OutcomeKind.PROCESSING,
    State.REVIEW: OutcomeKind.UNRECOGNISED,
    State.RESERVED: OutcomeKind.NOT_EXECUTED,
    State.CARD_DECLINED: OutcomeKind.CARD_DECLINED,
    State.REQUIRES_ACTION: OutcomeKind.REQUIRES_ACTION,
    State.REJECTED: OutcomeKind.REJECTED,
    State.BLOCKED: OutcomeKind.BLOCKED,
}


@pytest.fixture
def actions(engine: Engine, ledger: Ledger) -> LedgerActions:
    return LedgerActions(engine, ledger.limits, "operator:test")


def record_in(ledger: Ledger, state: State, billing_event: BillingEvent | None = None) -> Record:
    """A record of a fresh event in this state."""
    claim = claimed(ledger, new_record(billing_event))
    if state is State.VOIDED:
        ledger.record_outcome(claim, outcome(OutcomeKind.NOT_EXECUTED), NOW)
        actions = LedgerActions(ledger.engine, ledger.limits, "operator:test")
        return actions.void(reread(ledger, claim), reason="test", request_id="void-it").record
    if state is not State.SENT:
        ledger.record_outcome(claim, outcome(ALL_KINDS[state]), NOW)
    return reread(ledger, claim)


@pytest.mark.parametrize("state", State)
def test_a_recharge_starts_from_a_known_failure_only(
    ledger: Ledger, actions: LedgerActions, state: State
) -> None:
    record = record_in(ledger, state)

    def recharge() -> Record:
        return actions.recharge(
            record, from_epoch=0, reason="card changed", request_id="r1", payment_method="pm_2"
        ).record

    if state not in KNOWN_FAILURES:
        with pytest.raises(StateForbids):
            recharge()
        assert actions.find("cust_1", "2026-Q3") == record, "nothing changed"
        return
    fresh = recharge()
    assert fresh.state is State.RESERVED
    assert (fresh.attempt_epoch, fresh.payment_method, fresh.request_id) == (1, "pm_2", "r1")
    assert (fresh.attempts, fresh.first_sent_at, fresh.settled_at) == (0, None, None)
    assert (fresh.payment_intent_id, fresh.error_code) == (None, None)


def test_a_request_that_arrives_again_starts_nothing_more(
    ledger: Ledger, actions: LedgerActions
) -> None:
    record = record_in(ledger, State.CARD_DECLINED)
    first = actions.recharge(record, from_epoch=0, reason="again", request_id="click")
    second = actions.recharge(record, from_epoch=0, reason="again", request_id="click")
    assert (first.already, second.already) == (False, True)
    assert second.record.attempt_epoch == 1


def test_the_same_request_id_never_acts_on_two_records(
    ledger: Ledger, actions: LedgerActions
) -> None:
    one = record_in(ledger, State.CARD_DECLINED, event("cust_1"))
    two = record_in(ledger, State.CARD_DECLINED, event("cust_2"))
    actions.recharge(one, from_epoch=0, reason="x", request_id="r")
    with pytest.raises(StateForbids, match="used for another record"):
        actions.recharge(two, from_epoch=0, reason="x", request_id="r")
    assert actions.find("cust_2", "2026-Q3").attempt_epoch == 0


def test_an_epoch_that_has_passed_is_not_started_again(
    ledger: Ledger, actions: LedgerActions
) -> None:
    record = record_in(ledger, State.CARD_DECLINED)
    actions.recharge(record, from_epoch=0, reason="x", request_id="r1")
    with pytest.raises(StateForbids, match="epoch 1"):
        actions.recharge(record, from_epoch=0, reason="x", request_id="r2")
    with pytest.raises(StateForbids):
        actions.recharge(
            actions.find("cust_1", "2026-Q3"), from_epoch=0, reason="x", request_id="r3"
        )


def test_fifty_operators_at_once_start_one_epoch(ledger: Ledger, actions: LedgerActions) -> None:
    record = record_in(ledger, State.CARD_DECLINED)

    def recharge(number: int) -> bool:
        try:
            done = actions.recharge(record, from_epoch=0, reason="x", request_id=f"r{number}")
        except StateForbids:
            return False
        return not done.already

    assert at_once(50, recharge) == 1
    assert actions.find("cust_1", "2026-Q3").attempt_epoch == 1


def test_one_request_delivered_fifty_times_at_once_starts_one_epoch(
    ledger: Ledger, actions: LedgerActions
) -> None:
    record = record_in(ledger, State.CARD_DECLINED)

    def recharge(_: int) -> bool:
        return not actions.recharge(record, from_epoch=0, reason="x", request_id="same").already

    assert at_once(50, recharge) == 1
    assert actions.find("cust_1", "2026-Q3").attempt_epoch == 1


def test_void_and_claim_at_once_never_both_win(ledger: Ledger, actions: LedgerActions) -> None:
    for number in range(25):
        record = record_in(ledger, State.RESERVED, event(f"cust_{number}"))
        stored = request(new_record(event(f"cust_{number}")))

        def act(which: int, record: Record = record, stored: object = stored) -> bool:
            if which:
                return ledger.claim(record, stored, None) is not None  # type: ignore[arg-type]
            try:
                actions.void(record, reason="x", request_id=record.charge_key)
            except StateForbids:
                return False
            return True

        assert at_once(2, act) == 1


@pytest.mark.parametrize("state", State)
def test_a_void_goes_from_reserved_or_a_known_failure_only(
    ledger: Ledger, actions: LedgerActions, state: State
) -> None:
    record = record_in(ledger, state)
    if state in KNOWN_FAILURES | {State.RESERVED}:
        done = actions.void(record, reason="agreed with the customer", request_id="v1")
        assert done.record.state is State.VOIDED
        return
    with pytest.raises(StateForbids):
        actions.void(record, reason="x", request_id="v1")


def test_a_tombstone_keeps_an_event_from_ever_being_charged(
    ledger: Ledger, actions: LedgerActions
) -> None:
    new = new_record()
    identity = ("cust_1", "2026-Q3", new.charge_key)
    record = actions.tombstone(*identity, reason="duplicate contract", request_id="t1")
    assert record is not None
    assert (record.state, record.fingerprint, record.amount_cents) == (State.VOIDED, None, None)
    assert actions.tombstone(*identity, reason="again", request_id="t2") is None
    assert ledger.claim_new(new, request(new), None) is None


def test_a_review_is_closed_by_a_person_as_charged_or_not(
    ledger: Ledger, actions: LedgerActions
) -> None:
    one = record_in(ledger, State.REVIEW, event("cust_1"))
    two = record_in(ledger, State.REVIEW, event("cust_2"))
    charged = actions.resolve(
        one, State.CHARGED, reason="seen", request_id="a", payment_intent_id="pi_9"
    )
    rejected = actions.resolve(two, State.REJECTED, reason="not there", request_id="b")
    assert (charged.record.state, charged.record.payment_intent_id) == (State.CHARGED, "pi_9")
    assert rejected.record.state is State.REJECTED
    with pytest.raises(StateForbids):
        actions.resolve(charged.record, State.REJECTED, reason="x", request_id="c")


def test_who_and_why_stand_in_the_audit(
    ledger: Ledger, actions: LedgerActions, engine: Engine
) -> None:
    record = record_in(ledger, State.CARD_DECLINED)
    actions.recharge(record, from_epoch=0, reason="new card", request_id="r1")
    history = LedgerReads(engine).show("cust_1", "2026-Q3")
    assert history is not None
    last = history.events[-1]
    assert (last["from_state"], last["to_state"]) == ("card_declined", "reserved")
    assert (last["actor"], last["reason"], last["request_id"]) == (
        "operator:test",
        "new card",
        "r1",
    )


def test_an_unknown_identity_is_one_clear_line(actions: LedgerActions) -> None:
    with pytest.raises(NotFound, match="no billing record of nobody 2026-Q3"):
        actions.find("nobody", "2026-Q3")


# -- open intents ------------------------------------------------------------------------


def test_an_open_intent_is_polled_with_growing_pauses_and_ends(
    engine: Engine, database_url: str
) -> None:
    # Long beside what the test itself takes.
    limits = replace(FAST_LIMITS, poll_processing_s=1000.0, poll_processing_cap_s=5000.0)
    actions = LedgerActions(engine, limits, "operator:test")
    record_in(Ledger(engine, limits, "test"), State.PROCESSING)
    assert actions.take_polls(10) == [], "not before the first pause"
    clock.advance(database_url, limits.poll_processing_s)
    pauses = []
    for _ in range(4):
        ((record, now),) = actions.take_polls(10)
        assert actions.take_polls(10) == [], "one sweep at a time"
        still = actions.record_poll(record, outcome(OutcomeKind.PROCESSING), "open")
        assert still is not None
        assert still.next_attempt_at is not None
        pause = (still.next_attempt_at - now).total_seconds()
        pauses.append(pause)
        clock.advance(database_url, pause + 1)
    thousands = [round(pause / 1000) for pause in pauses]
    assert thousands == [2, 4, 5, 5], "doubling up to the cap"
    ((record, _),) = actions.take_polls(10)
    done = actions.record_poll(record, outcome(), "succeeded")
    assert done is not None
    assert done.state is State.CHARGED
    clock.advance(database_url, 86_400)
    assert actions.take_polls(10) == []


def test_a_poll_of_a_record_that_moved_meanwhile_changes_nothing(
    ledger: Ledger, actions: LedgerActions, database_url: str
) -> None:
    record_in(ledger, State.REQUIRES_ACTION)
    clock.advance(database_url, ledger.limits.poll_action_s + 1)
    ((record, _),) = actions.take_polls(10)
    actions.recharge(record, from_epoch=0, reason="x", request_id="r")
    assert actions.record_poll(record, outcome(), "succeeded") is None
    assert actions.find("cust_1", "2026-Q3").state is State.RESERVED


# -- import and recovery -----------------------------------------------------------------


def charged_row(number: int, **changes: object) -> ChargedRow:
    billing_event = event(f"cust_{number}")
    values: dict[str, object] = {
        "customer_id": billing_event.customer_id,
        "billing_period": billing_event.billing_period,
        "charge_key": charge_key(billing_event.customer_id, billing_event.billing_period),
        "fingerprint": billing_event.fingerprint,
        "amount_cents": billing_event.amount_cents,
        "currency": billing_event.currency,
        "stripe_customer_id": billing_event.stripe_customer_id,
        "billing_run": billing_event.billing_run,
        "payment_intent_id": None,
        "charge_id": f"ch_{number}",
    }
    return ChargedRow(**(values | changes))  # type: ignore[arg-type]


def test_an_import_takes_over_charges_and_knows_them_the_second_time(
    ledger: Ledger, actions: LedgerActions
) -> None:
    lines = [(number, charged_row(number)) for number in range(1, BATCH + 50)]
    assert actions.import_charges(lines) == (BATCH + 49, 0)
    assert actions.import_charges(lines[:7]) == (0, 7)
    record = actions.find("cust_3", "2026-Q3")
    assert (record.state, record.charge_id) == (State.CHARGED, "ch_3")
    new = new_record(event("cust_3"))
    assert ledger.claim_new(new, request(new), None) is None


@pytest.mark.parametrize(
    "wrong",
    [
        (BATCH + 20, charged_row(7, charge_id="ch_other")),
        (BATCH + 20, charged_row(7, amount_cents=9)),
        (3, charged_row(2, charge_id="ch_twice")),
    ],
)
def test_an_import_with_one_wrong_line_imports_nothing(
    actions: LedgerActions, engine: Engine, wrong: tuple[int, ChargedRow]
) -> None:
    lines = [(number, charged_row(number)) for number in range(1, BATCH + 100)]
    lines = [line for line in lines if line[0] != wrong[0]] + [wrong]
    lines.sort(key=lambda line: line[0])
    with pytest.raises(ImportConflict, match=f"^line {wrong[0]}: "):
        actions.import_charges(lines)
    assert LedgerReads(engine).counts() == []


def test_recovery_moves_many_unsettled_records_bit_by_bit(
    ledger: Ledger, actions: LedgerActions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guard: all of them in one statement would take longer than a statement may."""
    monkeypatch.setattr(ledger_actions, "UNSETTLED_BATCH", 10)
    for number in range(30):
        record_in(ledger, State.RESERVED if number % 2 else State.SENT, event(f"cust_{number}"))
    assert actions.recover_unsettled(ledger.read("").now) == 30
    assert LedgerReads(ledger.engine).counts() == [
        {"state": "sent", "currency": "usd", "records": 30, "total_cents": 30 * 2500}
    ]


def test_recovery_makes_every_success_charged_and_looks_the_rest_up(
    ledger: Ledger, actions: LedgerActions
) -> None:
    pin_deployment(ledger.engine, "stripe-billing")
    declined = record_in(ledger, State.CARD_DECLINED, event("cust_1"))
    sent = record_in(ledger, State.SENT, event("cust_2"))
    reserved = record_in(ledger, State.RESERVED, event("cust_3"))
    known = record_in(ledger, State.CHARGED, event("cust_4"))
    since = ledger.read(sent.charge_key).now - timedelta(hours=2)
    actions.start_recovery(since)
    found = [charged_row(1), charged_row(5, attempt_epoch=2), charged_row(4)]
    assert actions.recover_charged(found) == 2
    assert actions.recover_unsettled(since) == 2
    actions.end_recovery()
    assert actions.find("cust_1", "2026-Q3").state is State.CHARGED
    assert actions.find("cust_1", "2026-Q3").charge_id == "ch_1"
    assert actions.find("cust_5", "2026-Q3").attempt_epoch == 2
    assert actions.find("cust_4", "2026-Q3") == known
    for record in (sent, reserved):
        looked_up = ledger.read(record.charge_key).record
        assert looked_up is not None
        assert looked_up.state is State.SENT
        assert looked_up.first_sent_at == since - timedelta(hours=24)
        assert looked_up.lease_token is None
    assert declined.state is State.CARD_DECLINED


# -- dead letters ------------------------------------------------------------------------


def test_a_replay_makes_the_record_and_resolves_the_letter_or_does_neither(
    ledger: Ledger, actions: LedgerActions, engine: Engine
) -> None:
    letters = DeadLetters(engine)
    reason = DeadLetterReason.INVALID_EVENT
    one, two = (
        letters.bury(NewDeadLetter("nsq", "topic/channel", name, b"{}", reason, "amount_cents"))
        for name in ("m1", "m2")
    )
    new = new_record()
    record = actions.replay(one, new, reason="limit raised")
    assert record is not None
    assert record.state is State.RESERVED
    assert actions.replay(one, new_record(event("cust_2")), reason="x") is None
    assert actions.replay(two, new, reason="x") is None
    assert [letter.id for letter in letters.list(limit=10)] == [two]
    with engine.connect() as connection:
        count = connection.execute(text("SELECT count(*) FROM billing_records")).scalar()
    assert count == 1
    assert ledger.dispatch_due("", 10) == [new.charge_key]
