"""decide() and dispose(): exhaustive over states, leases, ages and histories."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta

import pytest

from models.decisions import (
    Action,
    DeliveryView,
    Disposition,
    RecordStatus,
    RecordView,
    absence_is_proof,
    backoff_s,
    decide,
    dispose,
)
from models.limits import FAST_LIMITS, Limits
from models.states import SETTLED, UNSETTLED, State

LIMITS = Limits()
NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
FINGERPRINT = "f" * 32


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def sent(**changes: object) -> RecordView:
    values: dict[str, object] = {
        "state": State.SENT,
        "fingerprint": FINGERPRINT,
        "first_sent_at": ago(60),
        "last_sent_at": ago(60),
        "attempts": 1,
        "claims": 1,
    }
    return RecordView(**(values | changes))  # type: ignore[arg-type]


def test_without_a_record_the_worker_charges() -> None:
    assert decide(None, NOW, LIMITS).action is Action.CHARGE


@pytest.mark.parametrize("state", sorted(SETTLED))
def test_a_settled_record_is_skipped_whatever_else_it_says(state: State) -> None:
    for lease, due, look_up, claims in itertools.product(
        (None, ago(-9), ago(9)), (None, ago(-9), ago(9)), (False, True), (0, 99)
    ):
        record = RecordView(
            state=state,
            fingerprint=FINGERPRINT,
            lease_expires_at=lease,
            next_attempt_at=due,
            look_up=look_up,
            claims=claims,
        )
        assert decide(record, NOW, LIMITS).action is Action.SKIP


@pytest.mark.parametrize("state", sorted(UNSETTLED))
def test_a_live_lease_is_left_alone_and_so_is_a_record_that_is_not_due(state: State) -> None:
    for changes in ({"lease_expires_at": ago(-0.001)}, {"next_attempt_at": ago(-0.001)}):
        record = sent(state=state, **changes)
        assert decide(record, NOW, LIMITS).action is Action.LEAVE


def test_a_lease_ends_at_its_moment_and_due_begins_at_its_own() -> None:
    record = sent(lease_expires_at=NOW, next_attempt_at=NOW)
    assert decide(record, NOW, LIMITS).action is Action.RESEND


def test_a_reserved_record_is_charged() -> None:
    record = RecordView(state=State.RESERVED, fingerprint=FINGERPRINT)
    assert decide(record, NOW, LIMITS).action is Action.CHARGE


def test_a_sent_record_inside_the_window_is_sent_again_with_the_same_key() -> None:
    first = ago(LIMITS.resend_window_s - 0.001)
    assert decide(sent(first_sent_at=first), NOW, LIMITS).action is Action.RESEND


@pytest.mark.parametrize(
    "changes",
    [
        {"first_sent_at": ago(LIMITS.resend_window_s)},
        {"first_sent_at": ago(48 * 3600)},
        {"first_sent_at": None},
        {"look_up": True},
        {"unknowns": LIMITS.max_unknowns},
    ],
)
def test_where_the_idempotency_store_is_no_help_stripe_is_asked_first(
    changes: dict[str, object],
) -> None:
    assert decide(sent(**changes), NOW, LIMITS).action is Action.LOOK_UP


def test_another_stripe_key_than_the_one_it_went_out_with_means_a_look_up() -> None:
    assert decide(sent(), NOW, LIMITS, upstream_changed=True).action is Action.LOOK_UP
    assert decide(None, NOW, LIMITS, upstream_changed=True).action is Action.CHARGE


def test_ten_claims_without_any_outcome_are_enough_for_a_person() -> None:
    assert decide(sent(claims=LIMITS.max_claims - 1), NOW, LIMITS).action is Action.RESEND
    assert decide(sent(claims=LIMITS.max_claims), NOW, LIMITS).action is Action.GIVE_UP


def test_nothing_is_resent_past_the_window_in_any_combination() -> None:
    for age_s, look_up, unknowns, claims, changed in itertools.product(
        (0, 60, 19.9 * 3600, 20 * 3600, 25 * 3600, 100 * 3600),
        (False, True),
        range(7),
        range(12),
        (False, True),
    ):
        record = sent(first_sent_at=ago(age_s), look_up=look_up, unknowns=unknowns, claims=claims)
        decision = decide(record, NOW, LIMITS, upstream_changed=changed)
        if decision.action is Action.RESEND:
            assert age_s < LIMITS.resend_window_s
            assert not look_up
            assert not changed
            assert unknowns < LIMITS.max_unknowns
            assert claims < LIMITS.max_claims


def test_absence_is_proof_only_when_no_request_can_still_be_running() -> None:
    record = sent(last_sent_at=ago(LIMITS.proof_of_absence_s))
    assert absence_is_proof(record, NOW, LIMITS)
    assert not absence_is_proof(record, NOW - timedelta(milliseconds=1), LIMITS)


@pytest.mark.parametrize("limits", [LIMITS, FAST_LIMITS])
def test_the_pause_doubles_up_to_its_cap_with_full_jitter(limits: Limits) -> None:
    whole = [backoff_s(failures, limits, 1.0) for failures in range(1, 60)]
    assert whole[0] == limits.backoff_base_s
    assert whole[1] == min(2 * limits.backoff_base_s, limits.backoff_cap_s)
    assert whole == sorted(whole)
    assert whole[-1] == limits.backoff_cap_s
    assert backoff_s(7, limits, 0.0) == 0.0
    assert backoff_s(0, limits, 1.0) == limits.backoff_base_s


def delivery(**changes: object) -> DeliveryView:
    values: dict[str, object] = {
        "fingerprint": FINGERPRINT,
        "age_s": 1.0,
        "published_ago_s": 1.0,
        "later_round": False,
    }
    return DeliveryView(**(values | changes))  # type: ignore[arg-type]


AGES = (0.0, LIMITS.park_after_s - 0.001, LIMITS.park_after_s, 10 * LIMITS.park_after_s)
PUBLISHED = (None, 0.0, LIMITS.redispatch_after_s - 0.001, LIMITS.redispatch_after_s, 1e6)


@pytest.mark.parametrize("later_round", [False, True])
@pytest.mark.parametrize("age_s", AGES)
@pytest.mark.parametrize("published_ago_s", PUBLISHED)
@pytest.mark.parametrize("state", State)
def test_only_a_settled_record_of_the_same_money_fields_is_acked(
    state: State, published_ago_s: float | None, age_s: float, later_round: bool
) -> None:
    held = delivery(age_s=age_s, published_ago_s=published_ago_s, later_round=later_round)
    same = dispose(held, RecordStatus(state, FINGERPRINT), LIMITS)
    assert (same is Disposition.ACK) == (state in SETTLED)
    assert same in (Disposition.ACK, Disposition.WAIT, Disposition.PARK)
    other = dispose(held, RecordStatus(state, "0" * 32), LIMITS)
    assert other is Disposition.DEAD_LETTER


@pytest.mark.parametrize("age_s", AGES)
def test_without_a_record_the_event_is_published_and_again_after_a_while(age_s: float) -> None:
    for later_round in (False, True):
        for waited in PUBLISHED:
            held = delivery(age_s=age_s, published_ago_s=waited, later_round=later_round)
            due = waited is None or waited >= LIMITS.redispatch_after_s
            assert dispose(held, None, LIMITS) is (Disposition.PUBLISH if due else Disposition.WAIT)


def test_a_slow_record_is_parked_when_its_time_is_up_or_in_a_later_round() -> None:
    record = RecordStatus(State.SENT, FINGERPRINT)
    assert dispose(delivery(age_s=AGES[1]), record, LIMITS) is Disposition.WAIT
    assert dispose(delivery(age_s=AGES[2]), record, LIMITS) is Disposition.PARK
    assert dispose(delivery(later_round=True), record, LIMITS) is Disposition.PARK


def test_a_tombstone_stands_for_every_event_of_its_identity() -> None:
    tombstone = RecordStatus(State.VOIDED, None)
    assert dispose(delivery(fingerprint="anything"), tombstone, LIMITS) is Disposition.ACK
