"""What is found out about a charge is told to the vault first, so that its hold ends."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text

from models.errors import ChargebridgeError
from models.keys import charge_key
from models.outcomes import Outcome, OutcomeKind
from models.records import Record
from models.states import State
from models.vault_wire import VaultWire
from tasks.manual import Manual
from tasks.polling import Polling
from tasks.reconcile import reconciliation
from tasks.recover import Recovery
from tasks.vault_holds import VaultHolds
from tests.support.faults import FaultPoints
from tests.support.flows import PERIOD, Worker
from tests.support.stripe import Stripe
from tests.support.vault import ADMIN_KEY, RUN, Books, VaultProcess
from tests.support.vaulted_workers import AMOUNT, budget, charge, later
from tests.support.waiting import wait_until
from tests.unit.scripted_server import reply, serving


def test_a_look_up_goes_through_the_vault_and_tells_it_first(
    vaulted_worker: Worker,
    vault: VaultProcess,
    fault_point: FaultPoints,
    books: Books,
    stripe: Stripe,
) -> None:
    fault_point("vault.after_answer", "kill")
    assert charge(vaulted_worker, "cus_taken") == State.SENT
    wait_until(lambda: not vault.is_alive(), 30, "the vault is dead")
    vault.restart()
    fault_point("vault.before_send", "kill")
    assert charge(vaulted_worker, "cus_absent") == State.SENT
    wait_until(lambda: not vault.is_alive(), 30, "the vault is dead")
    vaulted_worker.pass_time(25 * 3600)
    # Neither the lists nor the holds can be reached: nothing is decided.
    assert vaulted_worker.drive("cus_taken") == State.SENT
    vault.restart()
    sent = len(stripe.creates())
    assert later(vaulted_worker, "cus_taken", 60) == State.CHARGED
    assert later(vaulted_worker, "cus_absent", 60) == State.RESERVED
    assert len(stripe.creates()) == sent
    assert budget(books) == (AMOUNT, 0)
    assert later(vaulted_worker, "cus_absent") == State.CHARGED
    assert budget(books) == (2 * AMOUNT, 0)
    books.check()


def test_a_look_up_that_slept_lets_go_of_nothing_that_was_sent_meanwhile(
    vaulted_worker: Worker, books: Books, stripe: Stripe
) -> None:
    """Two find that nothing was executed; one sleeps before it says so, the other sends again."""

    class Sleeper(VaultHolds):
        awake = False

        def tell(self, record: Record, outcome: Outcome, *given: Any, **named: Any) -> None:
            if not self.awake:
                self.awake = True
                assert outcome.error_code == "absent"
                assert later(vaulted_worker, "cus_processing_1", 60) == State.RESERVED
                assert later(vaulted_worker, "cus_processing_1", 60) == State.PROCESSING
            super().tell(record, outcome, *given, **named)

    stripe.fault("reset", stage="before", customer="cus_processing_1")
    assert charge(vaulted_worker, "cus_processing_1") == State.SENT
    vaulted_worker.pass_time(21 * 3600)
    sleeper = Sleeper.from_settings(vaulted_worker.here.settings)
    vaulted_worker.flow.look_up.holds = sleeper
    vaulted_worker.drive("cus_processing_1")
    assert sleeper.awake
    assert vaulted_worker.record("cus_processing_1").state is State.PROCESSING
    assert budget(books) == (0, AMOUNT), "the pending debit is still held"
    sleeper.close()


def test_money_is_told_without_the_moment_at_which_it_was_seen(vaulted_worker: Worker) -> None:
    """Guard: a vault of an older version knows no such moment; a success must not wait for it."""
    assert charge(vaulted_worker, "cus_good_1") == State.CHARGED
    record = vaulted_worker.record("cus_good_1")
    with serving(reply(200, {})) as server:
        wire = VaultWire(server.url, ADMIN_KEY)
        for kind in (OutcomeKind.CHARGED, OutcomeKind.CARD_DECLINED):
            VaultHolds(wire, "stripe-billing").tell(
                record, Outcome(kind), seen_at=record.updated_at
            )
        wire.close()
        told = [json.loads(request.partition(b"\r\n\r\n")[2]) for request in server.requests]
    moment = record.updated_at.isoformat()
    assert told == [{"outcome": "settled"}, {"outcome": "failed", "seen_at": moment}]


def test_money_that_no_hold_counts_rings(
    vaulted_worker: Worker, books: Books, caplog: pytest.LogCaptureFixture
) -> None:
    assert charge(vaulted_worker, "cus_good_1") == State.CHARGED
    with books.engine.connect() as connection:
        connection.execute(text("DELETE FROM vault_holds"))
    record = vaulted_worker.record("cus_good_1")
    paid = Outcome(OutcomeKind.CHARGED, payment_intent_id=record.payment_intent_id)
    vaulted_worker.here.holds.tell(record, paid)
    assert "alarm_hold_missing" in caplog.text
    caplog.clear()
    vaulted_worker.here.holds.tell(record, Outcome(OutcomeKind.CARD_DECLINED))
    assert "alarm" not in caplog.text


def test_an_open_intent_keeps_its_hold_until_it_is_known_what_became_of_it(
    vaulted_worker: Worker, books: Books, stripe: Stripe
) -> None:
    assert charge(vaulted_worker, "cus_processing_1") == State.PROCESSING
    assert budget(books) == (0, AMOUNT)
    intent = vaulted_worker.record("cus_processing_1").payment_intent_id
    assert intent is not None
    stripe.settle(intent)
    vaulted_worker.pass_time(10)
    Polling(vaulted_worker.actions, vaulted_worker.here.gateway, vaulted_worker.here.holds).run()
    assert vaulted_worker.record("cus_processing_1").state is State.CHARGED
    assert budget(books) == (AMOUNT, 0)


def test_an_intent_that_died_elsewhere_does_not_stand_in_a_recharges_way(
    vaulted_worker: Worker, books: Books, stripe: Stripe
) -> None:
    assert charge(vaulted_worker, "cus_auth_1") == State.REQUIRES_ACTION
    assert budget(books) == (0, AMOUNT)
    stripe.form(
        f"/v1/payment_intents/{vaulted_worker.record('cus_auth_1').payment_intent_id}/cancel"
    )
    vaulted_worker.recharge("cus_auth_1", payment_method="pm_card_visa")
    assert vaulted_worker.drive("cus_auth_1") == State.CHARGED
    assert budget(books) == (AMOUNT, 0)
    assert len(vaulted_worker.charges("cus_auth_1")) == 1


def test_a_refusal_that_was_lost_with_its_vault_does_not_stand_in_a_recharges_way(
    vaulted_worker: Worker,
    vault: VaultProcess,
    books: Books,
    fault_point: FaultPoints,
) -> None:
    """Guard: the first epoch has left no object at Stripe, only a hold whose forward died."""
    fault_point("vault.after_answer", "kill")
    assert charge(vaulted_worker, "cus_good", payment_method="pm_missing_1") == State.SENT
    wait_until(lambda: not vault.is_alive(), 30, "the vault is dead")
    vault.restart()
    assert later(vaulted_worker, "cus_good", 5) == State.REJECTED
    assert budget(books) == (0, AMOUNT), "a forward may still be open, as far as is known"
    vaulted_worker.recharge("cus_good", payment_method="pm_card_visa")
    wait_until(
        lambda: later(vaulted_worker, "cus_good", 60) == State.CHARGED, 60, "the recharge went out"
    )
    assert budget(books) == (AMOUNT, 0)
    assert len(vaulted_worker.charges("cus_good")) == 1


def test_an_intent_that_only_stripe_still_knows_does_not_stand_in_a_recharges_way(
    vaulted_worker: Worker, books: Books
) -> None:
    """Guard: after a restore neither an attempt nor a young object tells of the first epoch."""
    since = datetime.now(UTC) - timedelta(seconds=5)
    assert charge(vaulted_worker, "cus_auth_1") == State.REQUIRES_ACTION
    vaulted_worker.forget("cus_auth_1")
    books.forget_holds()
    vaulted_worker.pass_time(3 * 24 * 3600)
    Recovery(vaulted_worker.actions, vaulted_worker.here.gateway, vaulted_worker.here.settings).run(
        since
    )
    assert budget(books) == (0, AMOUNT)
    vaulted_worker.recharge("cus_auth_1", payment_method="pm_card_visa")
    assert later(vaulted_worker, "cus_auth_1", 60) == State.CHARGED
    assert budget(books) == (AMOUNT, 0)
    assert len(vaulted_worker.charges("cus_auth_1")) == 1


def test_what_a_person_resolves_is_told_to_the_vault_first(
    vaulted_worker: Worker, vault: VaultProcess, books: Books, stripe: Stripe
) -> None:
    here = vaulted_worker.here
    manual = Manual(
        vaulted_worker.actions,
        vaulted_worker.ledger,
        here.reads,
        here.gateway,
        here.settings.charge_namespace,
        holds=here.holds,
    )
    names = ("cus_processing_1", "cus_processing_2")
    assert [charge(vaulted_worker, name) for name in names] == [State.PROCESSING] * 2
    vaulted_worker.pass_time(15 * 24 * 3600)
    Polling(vaulted_worker.actions, here.gateway, here.holds).run()
    taken, failed = (vaulted_worker.record(name) for name in names)
    assert (taken.state, failed.state) == (State.REVIEW, State.REVIEW)
    assert budget(books) == (0, 2 * AMOUNT)
    assert taken.payment_intent_id is not None
    assert failed.payment_intent_id is not None
    stripe.settle(taken.payment_intent_id)
    stripe.settle(failed.payment_intent_id, "failed")
    vault.kill()
    with pytest.raises(ChargebridgeError):
        manual.resolve_not_charged(names[1], PERIOD, "the bank said no")
    assert vaulted_worker.record(names[1]).state is State.REVIEW
    vault.restart()
    manual.resolve_charged(names[0], PERIOD, taken.payment_intent_id, "the bank said yes")
    manual.resolve_not_charged(names[1], PERIOD, "the bank said no")
    assert [vaulted_worker.record(name).state for name in names] == [State.CHARGED, State.REJECTED]
    assert budget(books) == (AMOUNT, 0)


def test_the_sweep_resolves_what_a_settled_record_has_left_held(
    vaulted_worker: Worker, books: Books
) -> None:
    assert charge(vaulted_worker, "cus_good") == State.CHARGED
    books.forget_outcome(charge_key("cus_good", PERIOD))
    assert budget(books) == (0, AMOUNT)
    assert vaulted_worker.here.holds.resolve_left(vaulted_worker.here.engine) == 1
    assert budget(books) == (AMOUNT, 0)
    assert vaulted_worker.here.holds.resolve_left(vaulted_worker.here.engine) == 0


def test_a_charge_that_reconcile_finds_settles_its_hold_though_it_was_released(
    vaulted_worker: Worker, books: Books
) -> None:
    assert charge(vaulted_worker, "cus_good") == State.CHARGED
    key = charge_key("cus_good", PERIOD)
    books.give_back(key)
    assert budget(books) == (0, 0)
    vaulted_worker.forget("cus_good")
    with reconciliation(vaulted_worker.here, RUN, "test") as work:
        work.run()
        assert work.summary().adopted == 1
    assert vaulted_worker.record("cus_good").state is State.CHARGED
    assert budget(books) == (AMOUNT, 0)


def test_a_charge_that_reconcile_finds_is_not_adopted_before_the_vault_knows(
    vaulted_worker: Worker, books: Books, vault: VaultProcess
) -> None:
    assert charge(vaulted_worker, "cus_good") == State.CHARGED
    vaulted_worker.forget("cus_good")
    wire = VaultWire("http://127.0.0.1:9", ADMIN_KEY)
    unheard = replace(
        vaulted_worker.here, holds=VaultHolds(wire, vaulted_worker.here.settings.charge_namespace)
    )
    with (
        reconciliation(unheard, RUN, "test") as work,
        pytest.raises(ChargebridgeError, match="the vault could not be told"),
    ):
        work.run()
    assert vaulted_worker.here.reads.by_keys([charge_key("cus_good", PERIOD)]) == []
