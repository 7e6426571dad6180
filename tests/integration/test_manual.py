"""Void and resolve: what people decide is checked at Stripe first.

Guards: `Manual` asks Stripe before it writes; the ledger's compare-and-set on the record as read.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from models.errors import ChargebridgeError, NotFound, StateForbids
from models.outcomes import OutcomeKind
from models.states import State
from tasks.manual import Manual
from tests.support.flows import PATIENT, PERIOD, Worker
from tests.support.ledgers import outcome
from tests.support.stripe import Stripe

AUTH = "cus_auth_1"
DECLINED = "cus_decline_generic_decline_1"
GOOD = "cus_good_1"
WHY = "agreed on the phone"


@pytest.fixture
def worker(environment: dict[str, str], stripe: Stripe) -> Iterator[Worker]:
    made = Worker(environment, stripe, **PATIENT)
    yield made
    made.close()


@pytest.fixture
def manual(worker: Worker) -> Manual:
    here = worker.here
    return Manual(
        worker.actions, here.ledger, here.reads, here.gateway, here.settings.charge_namespace
    )


def in_review(worker: Worker, stripe: Stripe, customer: str, *, charged: bool) -> None:
    """A record whose outcome nobody could establish: the key replays a failure for ever."""
    stage = "after_commit" if charged else "after_claim"
    stripe.fault("http_500", stage=stage, customer=customer)
    worker.charge(customer)
    record = worker.record(customer)
    assert record.state is State.SENT
    assert worker.ledger.give_up(record, "test")


# -- void --------------------------------------------------------------------------------


def test_a_void_cancels_what_is_open(worker: Worker, manual: Manual, stripe: Stripe) -> None:
    worker.charge(AUTH)
    intent = str(worker.record(AUTH).payment_intent_id)
    assert manual.void(AUTH, PERIOD, WHY).state is State.VOIDED
    (found,) = [r for r in stripe.requests(method="POST") if r["path"].endswith("/cancel")]
    assert intent in found["path"]
    assert worker.charge(AUTH) == "skip:voided"


def test_a_void_of_what_was_paid_meanwhile_is_refused_and_the_money_is_kept(
    worker: Worker, manual: Manual, stripe: Stripe, caplog: pytest.LogCaptureFixture
) -> None:
    worker.charge(AUTH)
    stripe.complete(str(worker.record(AUTH).payment_intent_id))
    with pytest.raises(StateForbids, match="the record is review now"):
        manual.void(AUTH, PERIOD, WHY)
    assert worker.record(AUTH).state is State.REVIEW
    assert "alarm_late_success" in caplog.messages


def test_a_void_before_any_event_stands_for_every_event(worker: Worker, manual: Manual) -> None:
    assert manual.void("nobody_yet", PERIOD, WHY).state is State.VOIDED
    assert worker.charge("nobody_yet", stripe_customer_id="cus_1") == "skip:voided"
    assert worker.stripe.charges() == []


def test_a_void_without_stripes_answer_changes_nothing(
    worker: Worker, manual: Manual, stripe: Stripe
) -> None:
    worker.charge(AUTH)
    stripe.fault("http_500", method="GET", path="/v1/payment_intents")
    with pytest.raises(ChargebridgeError, match="nothing was changed"):
        manual.void(AUTH, PERIOD, WHY)
    assert worker.record(AUTH).state is State.REQUIRES_ACTION


def test_a_void_of_a_charge_is_refused(worker: Worker, manual: Manual) -> None:
    worker.charge(GOOD)
    with pytest.raises(StateForbids, match="charged"):
        manual.void(GOOD, PERIOD, WHY)


def test_a_void_needs_a_reason(worker: Worker, manual: Manual) -> None:
    worker.charge(DECLINED)
    with pytest.raises(ChargebridgeError, match="a reason is needed"):
        manual.void(DECLINED, PERIOD, " ")
    assert worker.record(DECLINED).state is State.CARD_DECLINED


# -- resolve -----------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["payment_intent", "id"])
def test_a_review_is_closed_by_an_object_that_is_its_own(
    worker: Worker, manual: Manual, stripe: Stripe, by: str
) -> None:
    in_review(worker, stripe, GOOD, charged=True)
    (charge,) = worker.charges(GOOD)
    record = manual.resolve_charged(GOOD, PERIOD, charge[by], WHY)
    assert (record.state, record.payment_intent_id, record.charge_id) == (
        State.CHARGED,
        charge["payment_intent"],
        charge["id"],
    )


def test_an_object_that_does_not_belong_to_the_record_is_refused(
    worker: Worker, manual: Manual, stripe: Stripe
) -> None:
    in_review(worker, stripe, GOOD, charged=False)
    key = worker.record(GOOD).charge_key
    wrong = {
        "another customer": stripe.charge_elsewhere("cus_2", 2500, charge_key=key),
        "another amount": stripe.charge_elsewhere(GOOD, 2600, charge_key=key),
        "another currency": stripe.charge_elsewhere(GOOD, 2500, "eur", charge_key=key),
        "another charge key": stripe.charge_elsewhere(GOOD, 2500, charge_key="0" * 32),
    }
    for why, item in wrong.items():
        with pytest.raises(StateForbids, match=why):
            manual.resolve_charged(GOOD, PERIOD, item["id"], WHY)
    with pytest.raises(NotFound, match="is not at Stripe"):
        manual.resolve_charged(GOOD, PERIOD, "pi_nothing", WHY)
    with pytest.raises(StateForbids, match="intent"):
        manual.resolve_charged(GOOD, PERIOD, "cus_1", WHY)
    assert worker.record(GOOD).state is State.REVIEW


def test_an_object_that_took_no_money_closes_nothing(
    worker: Worker, manual: Manual, stripe: Stripe
) -> None:
    worker.charge(AUTH)
    record = worker.record(AUTH)
    worker.pass_time(worker.limits.poll_for_s)
    ((polled, _),) = worker.actions.take_polls(1)
    worker.actions.record_poll(polled, outcome(OutcomeKind.UNRECOGNISED), "test")
    with pytest.raises(StateForbids, match="took no money"):
        manual.resolve_charged(AUTH, PERIOD, str(record.payment_intent_id), WHY)


def test_not_charged_waits_until_no_request_can_be_running(
    worker: Worker, manual: Manual, stripe: Stripe
) -> None:
    in_review(worker, stripe, GOOD, charged=False)
    with pytest.raises(StateForbids, match="may still be running"):
        manual.resolve_not_charged(GOOD, PERIOD, WHY)
    worker.pass_time(worker.limits.proof_of_absence_s + 1)
    assert manual.resolve_not_charged(GOOD, PERIOD, WHY).state is State.REJECTED
    assert worker.charges(GOOD) == []


def test_not_charged_is_refused_when_stripe_shows_the_money(
    worker: Worker, manual: Manual, stripe: Stripe
) -> None:
    in_review(worker, stripe, GOOD, charged=True)
    worker.pass_time(worker.limits.proof_of_absence_s + 1)
    with pytest.raises(StateForbids, match="see --charged"):
        manual.resolve_not_charged(GOOD, PERIOD, WHY)
    assert worker.record(GOOD).state is State.REVIEW


def test_only_a_review_is_resolved(worker: Worker, manual: Manual) -> None:
    worker.charge(GOOD)
    with pytest.raises(StateForbids):
        manual.resolve_not_charged(GOOD, PERIOD, WHY)
    with pytest.raises(NotFound):
        manual.resolve_not_charged("nobody", PERIOD, WHY)
