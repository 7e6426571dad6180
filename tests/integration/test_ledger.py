"""The ledger on a real PostgreSQL: claims, fences, outcomes, late truths, the sweep's query."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
from sqlalchemy import Engine, text

from models.deployment import pin_deployment
from models.errors import ConfigurationError, StateForbids
from models.ledger import Applied, Ledger, Retry
from models.ledger_reads import LedgerReads
from models.limits import FAST_LIMITS
from models.outcomes import History, OutcomeKind, classify
from models.records import Claim
from models.replies import read_reply
from models.states import KNOWN_FAILURES, State
from sandbox import clock
from tests.support.ledgers import at_once, claimed, event, new_record, outcome, request, reread

NOW = Retry(after_s=0.0)
LATER = Retry(after_s=60.0)


def expire_lease(engine: Engine, claim: Claim) -> None:
    with engine.connect() as connection:
        connection.execute(
            text(
                "UPDATE billing_records SET lease_expires_at = ledger_now() WHERE charge_key = :key"
            ),
            {"key": claim.record.charge_key},
        )


def again(ledger: Ledger, engine: Engine, claim: Claim) -> Claim:
    """The next worker's claim on the same record, after the lease has run out."""
    expire_lease(engine, claim)
    record = reread(ledger, claim)
    stored = ledger.stored_request(record.charge_key, record.attempt_epoch)
    assert stored is not None
    second = ledger.claim(record, stored, None)
    assert second is not None
    return second


def test_a_late_success_whose_writing_is_repeated_stays_for_a_person(ledger: Ledger) -> None:
    """Guard: the answer to the first commit can be lost; the second must not read it as calm."""
    claim = claimed(ledger)
    ledger.record_outcome(claim, outcome(OutcomeKind.CARD_DECLINED), Retry(0.0))
    key = claim.record.charge_key
    for _ in range(2):
        recorded = ledger.late_truth(key, outcome())
        assert recorded.applied is Applied.LATE_REVIEW
        assert reread(ledger, claim).state is State.REVIEW
    other = outcome(payment_intent_id="pi_2", charge_id="ch_2")
    assert ledger.late_truth(key, other).applied is Applied.DOUBLE_CHARGE
    assert reread(ledger, claim).payment_intent_id == "pi_1"


def test_the_first_claim_says_sent_before_anything_is_sent(ledger: Ledger) -> None:
    new = new_record()
    claim = claimed(ledger, new)
    record = reread(ledger, claim)
    assert record.state is State.SENT
    assert record.lease_token == claim.token
    assert (record.attempts, record.claims, record.unknowns) == (1, 1, 0)
    assert record.first_sent_at == record.last_sent_at is not None
    assert record.amount_cents == 2500
    assert record.fingerprint == new.event.fingerprint
    assert record.event == new.event.to_json()
    assert ledger.stored_request(new.charge_key, 0) == request(new)
    assert not claim.earlier_unknown


def test_fifty_at_once_make_one_claim(ledger: Ledger) -> None:
    new = new_record()
    assert at_once(50, lambda _: ledger.claim_new(new, request(new), None) is not None) == 1


def test_fifty_at_once_take_a_free_record_once(ledger: Ledger, engine: Engine) -> None:
    claim = claimed(ledger)
    expire_lease(engine, claim)
    record = reread(ledger, claim)
    stored = ledger.stored_request(record.charge_key, 0)
    assert stored is not None
    assert at_once(50, lambda _: ledger.claim(record, stored, None) is not None) == 1


def test_a_live_lease_is_not_taken(ledger: Ledger) -> None:
    claim = claimed(ledger)
    record = reread(ledger, claim)
    assert ledger.claim(record, request(new_record()), None) is None
    assert ledger.lease(record) is None


def test_a_record_that_has_moved_since_it_was_read_is_not_taken(
    ledger: Ledger, engine: Engine
) -> None:
    claim = claimed(ledger)
    expire_lease(engine, claim)
    stale = reread(ledger, claim)
    again(ledger, engine, claim)
    expire_lease(engine, claim)
    assert ledger.claim(stale, request(new_record()), None) is None


def test_a_claim_past_the_resend_window_is_refused_by_the_statement_itself(
    ledger: Ledger, engine: Engine, database_url: str
) -> None:
    claim = claimed(ledger)
    clock.advance(database_url, ledger.limits.resend_window_s + 1)
    record = reread(ledger, claim)
    assert ledger.claim(record, request(new_record()), None) is None
    assert ledger.lease(record) is not None


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (OutcomeKind.CHARGED, State.CHARGED),
        (OutcomeKind.PROCESSING, State.PROCESSING),
        (OutcomeKind.REQUIRES_ACTION, State.REQUIRES_ACTION),
        (OutcomeKind.CARD_DECLINED, State.CARD_DECLINED),
        (OutcomeKind.REJECTED, State.REJECTED),
        (OutcomeKind.BLOCKED, State.BLOCKED),
        (OutcomeKind.UNRECOGNISED, State.REVIEW),
    ],
)
def test_a_definite_outcome_settles_and_frees(
    ledger: Ledger, kind: OutcomeKind, state: State
) -> None:
    claim = claimed(ledger)
    recorded = ledger.record_outcome(
        claim, outcome(kind, error_code="a_code", decline_code="why"), NOW
    )
    record = reread(ledger, claim)
    assert recorded.applied is Applied.APPLIED
    assert recorded.record == record
    assert record.state is state
    assert record.settled_at is not None
    assert record.lease_token is None
    assert record.lease_expires_at is None
    assert (record.error_code, record.decline_code) == ("a_code", "why")


def test_an_unknown_stays_sent_and_is_counted(ledger: Ledger, engine: Engine) -> None:
    claim = claimed(ledger)
    ledger.record_outcome(claim, outcome(OutcomeKind.UNKNOWN), NOW)
    record = reread(ledger, claim)
    assert record.state is State.SENT
    assert (record.unknowns, record.claims, record.attempts) == (1, 0, 1)
    assert record.lease_token is None
    assert again(ledger, engine, claim).earlier_unknown


def test_the_last_allowed_unknown_waits_until_absence_can_be_proof(
    ledger: Ledger, engine: Engine
) -> None:
    claim = claimed(ledger)
    for unknowns in range(1, ledger.limits.max_unknowns + 1):
        ledger.record_outcome(claim, outcome(OutcomeKind.UNKNOWN), NOW)
        record = reread(ledger, claim)
        assert record.unknowns == unknowns
        assert record.next_attempt_at is not None
        assert record.last_sent_at is not None
        waits = (record.next_attempt_at - record.last_sent_at).total_seconds()
        if unknowns < ledger.limits.max_unknowns:
            assert waits < ledger.limits.proof_of_absence_s
            claim = again(ledger, engine, claim)
    assert waits >= ledger.limits.proof_of_absence_s


def test_an_answer_that_ends_the_keys_use_is_remembered(ledger: Ledger, engine: Engine) -> None:
    claim = claimed(ledger)
    ledger.record_outcome(claim, outcome(OutcomeKind.UNKNOWN_LOOK_UP), NOW)
    assert reread(ledger, claim).look_up
    ledger.record_outcome(again(ledger, engine, claim), outcome(OutcomeKind.UNKNOWN), NOW)
    assert reread(ledger, claim).look_up


def test_back_to_reserved_clears_the_history(ledger: Ledger) -> None:
    claim = claimed(ledger)
    ledger.record_outcome(claim, outcome(OutcomeKind.NOT_EXECUTED), LATER)
    record = reread(ledger, claim)
    assert record.state is State.RESERVED
    assert record.first_sent_at is None
    assert record.last_sent_at is None
    assert (record.attempts, record.unknowns, record.claims, record.deferrals) == (0, 0, 0, 1)
    assert record.next_attempt_at is not None
    assert record.settled_at is None


def test_a_worker_that_lost_its_lease_cannot_write_but_its_reply_is_kept(
    ledger: Ledger, engine: Engine
) -> None:
    slow = claimed(ledger)
    again(ledger, engine, slow)
    recorded = ledger.record_outcome(slow, outcome(OutcomeKind.CARD_DECLINED, http_status=402), NOW)
    assert recorded.applied is Applied.FENCED
    assert reread(ledger, slow).state is State.SENT
    history = LedgerReads(engine).show("cust_1", "2026-Q3")
    assert history is not None
    assert [attempt["outcome"] for attempt in history.attempts] == ["card_declined", None]
    assert history.attempts[0]["http_status"] == 402


def test_an_outcome_written_twice_is_written_once(ledger: Ledger, engine: Engine) -> None:
    claim = claimed(ledger)
    first = ledger.record_outcome(claim, outcome(), NOW)
    second = ledger.record_outcome(claim, outcome(), NOW)
    assert (first.applied, second.applied) == (Applied.APPLIED, Applied.FENCED)
    history = LedgerReads(engine).show("cust_1", "2026-Q3")
    assert history is not None
    assert [step["to_state"] for step in history.events] == ["sent", "charged"]


@pytest.mark.parametrize("state", sorted({State.SENT, State.RESERVED, State.REVIEW}))
def test_a_late_success_makes_an_open_record_charged(
    ledger: Ledger, engine: Engine, state: State
) -> None:
    slow = claimed(ledger)
    other = again(ledger, engine, slow)
    if state is State.RESERVED:
        ledger.record_finding(other, outcome(OutcomeKind.NOT_EXECUTED), LATER, "absent")
    elif state is State.REVIEW:
        ledger.record_outcome(other, outcome(OutcomeKind.UNRECOGNISED), NOW)
    assert reread(ledger, slow).state is state
    assert ledger.record_outcome(slow, outcome(), NOW).applied is Applied.LATE_CHARGED
    record = reread(ledger, slow)
    assert record.state is State.CHARGED
    assert record.payment_intent_id == "pi_1"


@pytest.mark.parametrize("state", sorted(KNOWN_FAILURES))
def test_a_late_success_on_a_settled_failure_goes_to_a_person(
    ledger: Ledger, engine: Engine, state: State
) -> None:
    slow = claimed(ledger)
    ledger.record_outcome(again(ledger, engine, slow), outcome(OutcomeKind(state)), NOW)
    assert ledger.record_outcome(slow, outcome(), NOW).applied is Applied.LATE_REVIEW
    assert reread(ledger, slow).state is State.REVIEW


def test_a_second_success_by_another_object_is_the_alarm_that_must_not_ring(
    ledger: Ledger, engine: Engine
) -> None:
    slow = claimed(ledger)
    ledger.record_outcome(again(ledger, engine, slow), outcome(), NOW)
    other = outcome(payment_intent_id="pi_2", charge_id="ch_2")
    assert ledger.record_outcome(slow, other, NOW).applied is Applied.DOUBLE_CHARGE
    assert reread(ledger, slow).payment_intent_id == "pi_1"


def test_a_claim_on_a_settled_record_is_a_move_that_does_not_exist(ledger: Ledger) -> None:
    claim = claimed(ledger)
    ledger.record_outcome(claim, outcome(), NOW)
    with pytest.raises(StateForbids):
        ledger.claim(reread(ledger, claim), request(new_record()), None)


def test_a_preparation_that_could_not_finish_keeps_the_event(ledger: Ledger) -> None:
    new = new_record()
    assert ledger.reserve(new, "no_billing_run", 60.0)
    assert not ledger.reserve(new, "no_billing_run", 60.0)
    record = ledger.read(new.charge_key).record
    assert record is not None
    assert record.state is State.RESERVED
    assert record.event == new.event.to_json()
    assert record.error_code == "no_billing_run"
    assert not ledger.defer(record, "still", 60.0), "it is not due yet"


def test_a_record_is_given_up_only_as_it_was_read(ledger: Ledger, engine: Engine) -> None:
    claim = claimed(ledger)
    expire_lease(engine, claim)
    stale = reread(ledger, claim)
    second = again(ledger, engine, claim)
    expire_lease(engine, second)
    assert not ledger.give_up(stale, "claims_without_outcome")
    assert ledger.give_up(reread(ledger, claim), "claims_without_outcome")
    assert reread(ledger, claim).state is State.REVIEW


def test_statuses_are_read_in_bulk(ledger: Ledger) -> None:
    claims = [claimed(ledger, new_record(event(f"cust_{n}"))) for n in range(5)]
    ledger.record_outcome(claims[0], outcome(), NOW)
    keys = [claim.record.charge_key for claim in claims]
    statuses = ledger.read_statuses([*keys, "0" * 32])
    assert set(statuses) == set(keys)
    assert statuses[keys[0]].state is State.CHARGED
    assert statuses[keys[1]].state is State.SENT
    # The texts are for the comparison of a repeat that is acked.
    told = claims[0].record.event["description"]
    assert (statuses[keys[0]].description, statuses[keys[1]].description) == (told, None)
    assert ledger.read_statuses([]) == {}


def test_the_sweep_gets_due_records_in_key_order_and_each_once(
    engine: Engine, database_url: str
) -> None:
    # Nothing is over before it is made so.
    limits = replace(FAST_LIMITS, lease_s=3600.0, redispatch_after_s=3600.0)
    ledger = Ledger(engine, limits, "test")
    claims = [claimed(ledger, new_record(event(f"cust_{n}"))) for n in range(10)]
    for claim in claims[:6]:
        expire_lease(engine, claim)
    ledger.record_outcome(claims[5], outcome(), NOW)
    due = sorted(claim.record.charge_key for claim in claims[:5])
    assert ledger.dispatch_due("", 3) == due[:3]
    assert ledger.dispatch_due(due[2], 3) == due[3:]
    assert ledger.dispatch_due("", 100) == [], "dispatched a moment ago"
    clock.advance(database_url, limits.redispatch_after_s + limits.lease_s)
    everyone = sorted(claim.record.charge_key for claim in claims if claim is not claims[5])
    assert ledger.dispatch_due("", 100) == everyone


def test_two_sweeps_at_once_never_dispatch_the_same_record(engine: Engine) -> None:
    # None is due again, however long it takes.
    ledger = Ledger(engine, replace(FAST_LIMITS, redispatch_after_s=3600.0), "test")
    for number in range(60):
        expire_lease(engine, claimed(ledger, new_record(event(f"cust_{number}"))))
    barrier = Barrier(4)

    def run(_: int) -> list[str]:
        barrier.wait()
        found: list[str] = []
        while batch := ledger.dispatch_due("", 7):
            found += batch
        return found

    with ThreadPoolExecutor(4) as pool:
        dispatched = [key for keys in pool.map(run, range(4)) for key in keys]
    assert len(dispatched) == len(set(dispatched)) == 60


def test_the_deployment_is_pinned_by_the_first_and_checked_by_the_rest(ledger: Ledger) -> None:
    pin_deployment(ledger.engine, "stripe-billing")
    pin_deployment(ledger.engine, "stripe-billing", livemode=False)
    pin_deployment(ledger.engine, "stripe-billing", livemode=False, account_id="acct_1")
    pin_deployment(ledger.engine, "stripe-billing")
    for wrong in (
        {"namespace": "other"},
        {"livemode": True},
        {"account_id": "acct_2"},
    ):
        with pytest.raises(ConfigurationError):
            pin_deployment(ledger.engine, **({"namespace": "stripe-billing"} | wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize("sign", ["\x00", "\ud800"])
def test_a_reply_with_signs_that_postgresql_cannot_store_is_recorded_all_the_same(
    ledger: Ledger, sign: str
) -> None:
    error = {"type": "card_error", "code": "card_declined", "message": f"declined{sign}"}
    reply = read_reply("payment_intents", 402, {}, {"error": error})
    judged = classify(reply, History(earlier_unknown=False, vaulted=False))
    recorded = ledger.record_outcome(claimed(ledger), judged, NOW)
    assert recorded.record is not None
    assert recorded.record.state is State.CARD_DECLINED
    assert recorded.record.error_message == "declined\ufffd"
