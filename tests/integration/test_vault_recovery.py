"""After a database restore the holds and budgets are what the ledger says."""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.engine import Engine

from models.billing_runs import BillingRuns
from models.hold_recovery import rebuild_holds
from models.keys import DEFAULT_NAMESPACE, idempotency_key
from models.ledger import Ledger, Retry
from models.left_holds import left_holds
from models.outcomes import OutcomeKind
from models.vault_wire import VaultWire
from tests.support.ledgers import claimed, event, new_record, outcome
from tests.support.stripe import Stripe
from tests.support.vault import ADMIN_KEY, RUN, Books, VaultProcess


def _records(ledger: Ledger, *kinds: OutcomeKind | None) -> list[str]:
    found = []
    for number, kind in enumerate(kinds):
        claim = claimed(ledger, new_record(event(f"cust_{number}", RUN)))
        if kind is not None:
            ledger.record_outcome(claim, outcome(kind), Retry(0))
        found.append(claim.record.charge_key)
    return found


def test_charges_are_settled_and_what_is_not_sure_is_held(
    engine: Engine, ledger: Ledger, books: Books
) -> None:
    BillingRuns(engine, "test").open(RUN, "usd", 100_000)
    charged, unsure, open_, declined = _records(
        ledger, OutcomeKind.CHARGED, None, OutcomeKind.PROCESSING, OutcomeKind.CARD_DECLINED
    )
    assert rebuild_holds(engine, DEFAULT_NAMESPACE).holds == 3
    states = {hold["charge_key"]: hold["state"] for hold in books.holds()}
    assert states == {charged: "settled", unsure: "unknown", open_: "unknown"}
    assert declined not in states
    assert books.budget() == {"cap_cents": 110_000, "settled_cents": 2500, "held_cents": 5000}
    books.check()


def test_running_it_again_changes_nothing(engine: Engine, ledger: Ledger, books: Books) -> None:
    BillingRuns(engine, "test").open(RUN, "usd", 100_000)
    _records(ledger, OutcomeKind.CHARGED, None)
    rebuild_holds(engine, DEFAULT_NAMESPACE)
    again = rebuild_holds(engine, DEFAULT_NAMESPACE)
    assert (again.holds, again.budgets) == (0, 0)


def test_a_hold_that_the_copy_has_as_released_is_settled_by_its_charge(
    engine: Engine, ledger: Ledger, books: Books
) -> None:
    run = BillingRuns(engine, "test").open(RUN, "usd", 100_000)
    (charged,) = _records(ledger, OutcomeKind.CHARGED)
    rival = idempotency_key("cust_0", RUN, 1)
    with engine.connect() as connection:
        for key, state in ((charged, "released"), (rival, "sent")):
            connection.execute(
                text(
                    "INSERT INTO vault_holds (run_id, idempotency_key, charge_key, attempt_epoch,"
                    " endpoint, amount_cents, state)"
                    " VALUES (:run, :key, :charge, 0, 'payment_intents', 2500, :state)"
                ),
                {"run": run.id, "key": key, "charge": charged, "state": state},
            )
    rebuild_holds(engine, DEFAULT_NAMESPACE)
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
