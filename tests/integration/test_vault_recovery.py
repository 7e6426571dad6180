"""After a database restore the holds and budgets are what the ledger says."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import text
from sqlalchemy.engine import Engine

from models.billing_runs import BillingRuns
from models.hold_recovery import rebuild_holds
from models.keys import DEFAULT_NAMESPACE, idempotency_key
from models.ledger import Ledger, Retry
from models.left_holds import left_holds
from models.outcomes import OutcomeKind
from models.vault_wire import VaultWire
from tasks.requests import CHARGES, PAYMENT_INTENTS
from tests.support.ledgers import claimed, event, new_record, outcome
from tests.support.stripe import Stripe
from tests.support.vault import ADMIN_KEY, RUN, Books, VaultProcess

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


def _records(ledger: Ledger, *kinds: OutcomeKind | None) -> list[str]:
    found = []
    for number, kind in enumerate(kinds):
        claim = claimed(ledger, new_record(event(f"cust_{number}", RUN)))
        if kind is not None:
            ledger.record_outcome(claim, outcome(kind), Retry(0))
        found.append(claim.record.charge_key)
    return found


def _insert_hold(
    engine: Engine, run_id: int, key: str, charge_key: str, state: str, *, epoch: int = 0
) -> None:
    with engine.connect() as connection:
        connection.execute(
            text(
                "INSERT INTO vault_holds (run_id, idempotency_key, charge_key, attempt_epoch,"
                " endpoint, amount_cents, state, late)"
                " VALUES (:run, :key, :charge, :epoch, 'payment_intents', 2500, :state, :late)"
            ),
            {
                "run": run_id,
                "key": key,
                "charge": charge_key,
                "epoch": epoch,
                "state": state,
                "late": epoch > 0,
            },
        )


def test_charges_are_settled_and_what_is_not_sure_is_held(
    engine: Engine, ledger: Ledger, books: Books
) -> None:
    BillingRuns(engine, "test").open(RUN, "usd", 100_000)
    charged, unsure, open_, declined = _records(
        ledger, OutcomeKind.CHARGED, None, OutcomeKind.PROCESSING, OutcomeKind.CARD_DECLINED
    )
    assert rebuild_holds(engine, LONG_AGO, DEFAULT_NAMESPACE, PAYMENT_INTENTS).holds == 3
    states = {hold["charge_key"]: hold["state"] for hold in books.holds()}
    assert states == {charged: "settled", unsure: "unknown", open_: "unknown"}
    assert declined not in states
    assert books.budget() == {"cap_cents": 110_000, "settled_cents": 2500, "held_cents": 5000}
    books.check()


def test_running_it_again_changes_nothing(engine: Engine, ledger: Ledger, books: Books) -> None:
    BillingRuns(engine, "test").open(RUN, "usd", 100_000)
    _records(ledger, OutcomeKind.CHARGED, None)
    rebuild_holds(engine, LONG_AGO, DEFAULT_NAMESPACE, PAYMENT_INTENTS)
    again = rebuild_holds(engine, LONG_AGO, DEFAULT_NAMESPACE, PAYMENT_INTENTS)
    assert (again.holds, again.budgets) == (0, 0)


def test_an_intent_of_a_later_epoch_is_held_in_the_place_of_an_earlier_ones(
    engine: Engine, ledger: Ledger, books: Books
) -> None:
    """Guard: the copy knows the hold of the first epoch, Stripe the intent of the second."""
    run = BillingRuns(engine, "test").open(RUN, "usd", 100_000)
    (charge_key,) = _records(ledger, OutcomeKind.REQUIRES_ACTION)
    _insert_hold(engine, run.id, charge_key, charge_key, "sent")
    with engine.connect() as connection:
        connection.execute(
            text("UPDATE billing_records SET attempt_epoch = 1, state = 'processing'")
        )
    rebuild_holds(engine, LONG_AGO, DEFAULT_NAMESPACE, PAYMENT_INTENTS)
    again = rebuild_holds(engine, LONG_AGO, DEFAULT_NAMESPACE, PAYMENT_INTENTS)
    assert (again.holds, again.budgets) == (0, 0)
    second = books.hold(idempotency_key("cust_0", RUN, 1))
    assert (second["state"], books.hold(charge_key)["state"]) == ("unknown", "released")
    assert books.budget() == {"cap_cents": 110_000, "settled_cents": 0, "held_cents": 2500}


def test_a_rebuilt_hold_is_of_the_endpoint_that_its_charge_goes_to(
    engine: Engine, ledger: Ledger, books: Books
) -> None:
    BillingRuns(engine, "test").open(RUN, "usd", 100_000)
    sent, lost = _records(ledger, None, None)
    with engine.connect() as connection:
        connection.execute(
            text("DELETE FROM charge_attempts WHERE charge_key = :key"), {"key": lost}
        )
    rebuild_holds(engine, LONG_AGO, DEFAULT_NAMESPACE, CHARGES)
    endpoints = [books.hold(key)["endpoint"] for key in (sent, lost)]
    assert endpoints == [PAYMENT_INTENTS, CHARGES]


def test_money_of_an_earlier_epoch_is_counted_once(
    engine: Engine, ledger: Ledger, books: Books
) -> None:
    run = BillingRuns(engine, "test").open(RUN, "usd", 100_000)
    (charge_key,) = _records(ledger, OutcomeKind.CHARGED)
    second = idempotency_key("cust_0", RUN, 1)
    _insert_hold(engine, run.id, charge_key, charge_key, "settled")
    _insert_hold(engine, run.id, second, charge_key, "unknown", epoch=1)
    with engine.connect() as connection:
        connection.execute(text("UPDATE billing_records SET attempt_epoch = 1"))
    assert [(h.idempotency_key, h.outcome) for h in left_holds(engine, limit=10)] == [
        (second, "failed")
    ]


def test_a_hold_that_the_copy_has_as_released_is_settled_by_its_charge(
    engine: Engine, ledger: Ledger, books: Books
) -> None:
    run = BillingRuns(engine, "test").open(RUN, "usd", 100_000)
    (charged,) = _records(ledger, OutcomeKind.CHARGED)
    rival = idempotency_key("cust_0", RUN, 1)
    _insert_hold(engine, run.id, charged, charged, "released")
    _insert_hold(engine, run.id, rival, charged, "sent")
    rebuild_holds(engine, LONG_AGO, DEFAULT_NAMESPACE, PAYMENT_INTENTS)
    assert books.hold(charged)["state"] == "settled"
    assert books.hold(charged)["late"]
    assert books.budget() == {"cap_cents": 110_000, "settled_cents": 2500, "held_cents": 2500}


def test_the_sweep_finds_holds_that_settled_records_left_behind(
    engine: Engine, ledger: Ledger, vault: VaultProcess, stripe: Stripe, books: Books
) -> None:
    key = vault.issue()
    charged, declined, unsure, open_ = _records(
        ledger, OutcomeKind.CHARGED, OutcomeKind.CARD_DECLINED, None, OutcomeKind.PROCESSING
    )
    stripe.fault("reset", stage="after_claim", times=4)
    for charge_key in (charged, declined, unsure, open_):
        vault.create(key, charge_key)
    left = left_holds(engine, limit=10)
    assert [(hold.idempotency_key, hold.outcome) for hold in left] == [
        (charged, "settled"),
        (declined, "failed"),
    ]
    wire = VaultWire(vault.url, ADMIN_KEY)
    for hold in left:
        wire.resolve(
            hold.idempotency_key,
            hold.outcome,
            payment_intent_id=hold.payment_intent_id,
            charge_id=hold.charge_id,
        )
    assert left_holds(engine, limit=10) == []
    assert left_holds(engine, limit=10, after_id=10**9) == []
    assert books.hold(charged)["payment_intent_id"] == "pi_1"
    assert [h["state"] for h in books.holds()] == ["settled", "released", "unknown", "unknown"]
    books.check()
