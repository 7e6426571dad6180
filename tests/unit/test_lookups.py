"""What complete lists of Stripe's objects prove about one charge."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from models.lookups import Evidence, SeenObject, Wanted, judge
from models.outcomes import OutcomeKind
from models.states import State
from tasks.look_up import seen_object

KEY = "0123456789abcdef0123456789abcdef"
WANTED = Wanted(charge_key=KEY, epoch=1, amount_cents=2500, currency="usd")
PROOF = Evidence(proof_time=True, customer_exists=True, store_spoilt=False)
TOO_EARLY = replace(PROOF, proof_time=False)
PAID = SeenObject(
    charge_key=KEY,
    epoch=1,
    status="succeeded",
    amount_cents=2500,
    currency="usd",
    payment_intent_id="pi_1",
    charge_id="ch_1",
)
DECLINED = replace(
    PAID,
    status="requires_payment_method",
    payment_intent_id="pi_2",
    error_code="card_declined",
    decline_code="insufficient_funds",
)
OTHER = replace(PAID, charge_key="f" * 32, payment_intent_id="pi_3")


@pytest.mark.parametrize("evidence", [PROOF, TOO_EARLY])
@pytest.mark.parametrize("epoch", [0, 1, 2, None])
def test_a_success_of_whatever_epoch_is_adopted_at_once(
    evidence: Evidence, epoch: int | None
) -> None:
    finding = judge(WANTED, [OTHER, replace(PAID, epoch=epoch), DECLINED], evidence)
    assert finding.outcome.state is State.CHARGED
    assert (finding.outcome.payment_intent_id, finding.outcome.charge_id) == ("pi_1", "ch_1")


def test_a_payment_that_is_processing_is_adopted_at_once() -> None:
    finding = judge(WANTED, [replace(PAID, status="processing")], TOO_EARLY)
    assert finding.outcome.state is State.PROCESSING


@pytest.mark.parametrize(
    "second", [PAID, replace(PAID, epoch=0), replace(PAID, status="processing")]
)
def test_two_that_took_money_are_a_double_charge_for_a_person(second: SeenObject) -> None:
    for order in permutations([PAID, replace(second, payment_intent_id="pi_9")]):
        finding = judge(WANTED, order, PROOF)
        assert finding.double_charge
        assert finding.outcome.state is State.REVIEW


@pytest.mark.parametrize("change", [{"amount_cents": 2501}, {"currency": "eur"}])
@pytest.mark.parametrize("item", [PAID, DECLINED])
def test_another_amount_or_currency_is_for_a_person(
    item: SeenObject, change: dict[str, object]
) -> None:
    finding = judge(WANTED, [replace(item, **change)], PROOF)  # type: ignore[arg-type]
    assert finding.outcome.state is State.REVIEW


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ("requires_payment_method", State.CARD_DECLINED),
        ("canceled", State.CARD_DECLINED),
        ("failed", State.CARD_DECLINED),
        ("requires_action", State.REQUIRES_ACTION),
        ("requires_confirmation", State.REVIEW),
        ("requires_capture", State.REVIEW),
        ("a_status_of_tomorrow", State.REVIEW),
        (None, State.REVIEW),
    ],
)
def test_a_failure_counts_only_once_no_request_can_still_be_running(
    status: str | None, state: State
) -> None:
    item = replace(DECLINED, status=status)
    early = judge(WANTED, [item], TOO_EARLY)
    assert (early.outcome.kind, early.outcome.state) == (OutcomeKind.UNKNOWN, State.SENT)
    assert judge(WANTED, [item], PROOF).outcome.state is state


def test_a_refused_authentication_asks_for_the_customer() -> None:
    item = replace(DECLINED, error_code="authentication_required", decline_code=None)
    assert judge(WANTED, [item], PROOF).outcome.state is State.REQUIRES_ACTION


def test_a_failure_of_another_epoch_is_not_this_ones() -> None:
    finding = judge(WANTED, [replace(DECLINED, epoch=0)], PROOF)
    assert (finding.why, finding.outcome.state) == ("absent", State.RESERVED)


def test_a_failure_keeps_its_codes() -> None:
    outcome = judge(WANTED, [DECLINED], PROOF).outcome
    assert (outcome.error_code, outcome.decline_code) == ("card_declined", "insufficient_funds")


@pytest.mark.parametrize(
    ("evidence", "state"),
    [
        (PROOF, State.RESERVED),
        (TOO_EARLY, State.SENT),
        (replace(PROOF, customer_exists=False), State.REVIEW),
        (replace(PROOF, store_spoilt=True), State.REVIEW),
        (replace(TOO_EARLY, customer_exists=False, store_spoilt=True), State.SENT),
    ],
)
@pytest.mark.parametrize("listed", [[], [OTHER]])
def test_absence_is_proof_under_all_its_conditions_only(
    evidence: Evidence, state: State, listed: list[SeenObject]
) -> None:
    assert judge(WANTED, listed, evidence).outcome.state is state


def test_a_listed_intent_is_read_into_plain_values() -> None:
    intent = {
        "id": "pi_1",
        "object": "payment_intent",
        "status": "succeeded",
        "amount": 2500,
        "currency": "usd",
        "latest_charge": {"id": "ch_1", "object": "charge"},
        "metadata": {"charge_key": KEY, "attempt_epoch": "1"},
    }
    assert seen_object(intent) == PAID


def test_a_listed_charge_without_capture_is_not_paid() -> None:
    charge = {
        "id": "ch_1",
        "object": "charge",
        "status": "succeeded",
        "captured": False,
        "amount": 2500,
        "currency": "usd",
        "payment_intent": "pi_1",
        "metadata": {"charge_key": KEY, "attempt_epoch": "1"},
    }
    assert seen_object(charge) == replace(PAID, status="requires_capture")


@pytest.mark.parametrize("metadata", [None, {}, {"attempt_epoch": "one"}])
def test_an_object_of_somebody_else_is_read_all_the_same(metadata: object) -> None:
    seen = seen_object({"id": "pi_1", "object": "payment_intent", "metadata": metadata})
    assert (seen.charge_key, seen.epoch) == (None, None)
