"""Single decisions, imports, recoveries and dead letters, as operators command them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from models.dead_letters import DeadLetters, NewDeadLetter
from models.deployment import pin_deployment
from models.errors import DeadLetterReason
from models.keys import charge_key
from models.ledger import boot_clock_s
from models.ledger_reads import LedgerReads
from models.states import State
from tests.support.commands import Commands
from tests.support.flows import PATIENT, PERIOD, Worker
from tests.support.roles import RoleStarter
from tests.support.stripe import Stripe
from tests.support.waiting import wait_until

AUTH = "cus_auth_1"
GOOD = "cus_good_1"
RECOVER = ("ledger", "recover", "--force", "--since")
"""Without waiting for workers to answer, where there are none."""


@pytest.fixture
def worker(environment: dict[str, str], stripe: Stripe) -> Iterator[Worker]:
    made = Worker(environment, stripe, **PATIENT)
    yield made
    made.close()


@pytest.fixture
def celery(environment: dict[str, str], tmp_path: Path) -> Commands:
    return Commands(environment, tmp_path)


def test_void_and_resolve_say_who_and_why(worker: Worker, celery: Commands) -> None:
    worker.charge(AUTH)
    assert celery.run("ledger", "void", AUTH, PERIOD).returncode == 2, "a reason is needed"
    done = celery.done("ledger", "void", AUTH, PERIOD, "--reason", "by mistake", OPERATOR="ann")
    assert done == f"{AUTH} {PERIOD} is voided\n"
    history = LedgerReads(worker.here.engine).show(AUTH, PERIOD)
    assert history is not None
    assert (history.events[-1]["actor"], history.events[-1]["reason"]) == ("ann", "by mistake")
    again = celery.refused("ledger", "void", AUTH, PERIOD, "--reason", "x")
    assert again == "a record that is voided cannot become voided by void"
    line = celery.refused("ledger", "resolve", AUTH, PERIOD, "--charged", "pi_1", "--reason", "x")
    assert "voided" in line
    assert celery.run("ledger", "resolve", AUTH, PERIOD, "--reason", "x").returncode == 2


def status_of_intent(worker: Worker, intent: str) -> str:
    found = worker.here.gateway.retrieve("payment_intents", intent, boot_clock_s() + 30)
    assert found is not None
    return str(found["status"])


# -- import ------------------------------------------------------------------------------


def imported(number: int, **changes: Any) -> dict[str, Any]:
    values = {
        "customer_id": f"cust_{number}",
        "billing_period": PERIOD,
        "stripe_customer_id": f"cus_{number}",
        "charge_id": f"ch_{number}",
        "amount_cents": 2500,
        "currency": "USD",
    }
    return values | changes


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return path


def test_an_import_is_taken_over_once_and_never_charged_again(
    worker: Worker, celery: Commands, tmp_path: Path
) -> None:
    file = written(tmp_path / "old.jsonl", imported(1), "", imported(2, charge_id="pi_2"))
    assert celery.json("ledger", "import", str(file)) == {"imported": 2, "known": 0}
    assert celery.json("ledger", "import", str(file)) == {"imported": 0, "known": 2}
    assert worker.record("cust_2").payment_intent_id == "pi_2"
    assert worker.charge("cust_1", stripe_customer_id="cus_1") == "skip:charged"
    assert worker.stripe.creates() == []


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("{", "the body is not JSON"),
        ("[]", "one JSON object"),
        (imported(3, charge_id=None), "charge_id is missing"),
        (imported(3, amount_cents="9"), "amount_cents"),
        (imported(3, charge_id="re_1"), "charge_id must be"),
        (imported(3, charge="ch_1"), "a name that an import does not know"),
        (imported(1, charge_id="ch_other"), "the ledger holds another charge"),
    ],
)
def test_one_bad_line_is_named_and_nothing_is_imported(
    worker: Worker, celery: Commands, tmp_path: Path, bad: object, why: str
) -> None:
    file = written(tmp_path / "old.jsonl", imported(1), imported(2), bad)
    line = celery.refused("ledger", "import", str(file))
    assert line.startswith(f"{file}:3: ")
    assert why in line
    assert LedgerReads(worker.here.engine).counts() == []


def test_a_file_that_is_not_there_is_one_line(celery: Commands, tmp_path: Path) -> None:
    line = celery.refused("ledger", "import", str(tmp_path / "none.jsonl"))
    assert line.endswith("none.jsonl: No such file or directory")


# -- recover -----------------------------------------------------------------------------


def test_after_a_restore_charges_are_adopted_and_the_rest_is_looked_up(
    worker: Worker, celery: Commands, stripe: Stripe
) -> None:
    """The copy was taken before three charges: one row is gone, one unsettled, one declined."""
    since = datetime.now(UTC).isoformat()
    for customer in (GOOD, "cus_good_2", "cus_good_3", "cus_good_4"):
        worker.charge(customer)
    stripe.charge_elsewhere("cus_9", 100, charge_key="not ours")
    stripe.charge_elsewhere("cus_9", 100)
    forget(worker, GOOD)
    change(worker, "cus_good_2", "state = 'reserved', payment_intent_id = NULL, attempts = 0")
    change(worker, "cus_good_3", "state = 'card_declined', payment_intent_id = NULL")
    done = celery.json("ledger", "recover", "--since", since)
    assert done == {"seen": 4, "charged": 3, "open": 0, "looked_up": 0, "skipped": 1}
    for customer in (GOOD, "cus_good_2", "cus_good_3"):
        record = worker.record(customer)
        (charge,) = worker.charges(customer)
        assert (record.state, record.charge_id) == (State.CHARGED, charge["id"])
        assert worker.charge(customer) == "skip:charged"
    assert len(stripe.charges()) == 6


@pytest.mark.parametrize(
    ("customer", "state"),
    [("cus_processing_1", State.PROCESSING), (AUTH, State.REQUIRES_ACTION)],
)
def test_after_a_restore_what_is_open_at_stripe_is_not_asked_for_again(
    worker: Worker, celery: Commands, stripe: Stripe, customer: str, state: State
) -> None:
    """Guard: the idempotency key alone protects a lost record for no longer than a day."""
    since = datetime.now(UTC).isoformat()
    worker.charge(customer)
    forget(worker, customer)
    done = celery.json(*RECOVER, since)
    assert (done["charged"], done["open"]) == (0, 1)
    worker.pass_time(25 * 3600)
    assert worker.charge(customer) == f"skip:{state}"
    assert worker.record(customer).payment_intent_id is not None
    assert len(stripe.creates()) == 1
    assert [record.charge_key for record, _ in worker.actions.take_polls(5)] == [
        charge_key(customer, PERIOD)
    ]


def recovered_after(worker: Worker, celery: Commands, days: int) -> str:
    """An open intent whose record was lost, so many days ago, and is recovered now; its id."""
    since = datetime.now(UTC).isoformat()
    worker.charge(AUTH)
    forget(worker, AUTH)
    worker.pass_time(days * 24 * 3600)
    celery.done(*RECOVER, since)
    intent = worker.record(AUTH).payment_intent_id
    assert intent is not None
    return intent


@pytest.mark.parametrize("days", [0, 3])
def test_a_recovered_open_intent_can_be_recharged_and_is_canceled_first(
    worker: Worker, celery: Commands, stripe: Stripe, days: int
) -> None:
    """Guard: an intent that is older than its record must still be in the list."""
    earlier = recovered_after(worker, celery, days)
    worker.recharge(AUTH, payment_method="pm_card_visa")
    assert worker.drive(AUTH) == "charged"
    assert status_of_intent(worker, earlier) == "canceled"
    assert len(worker.charges(AUTH)) == 1


@pytest.mark.parametrize("days", [0, 3])
def test_a_recovered_open_intent_is_canceled_before_its_record_is_voided(
    worker: Worker, celery: Commands, stripe: Stripe, days: int
) -> None:
    """Guard: a record that was recovered has no attempts, and is younger than its intent."""
    intent = recovered_after(worker, celery, days)
    celery.done("ledger", "void", AUTH, PERIOD, "--reason", "by mistake")
    assert status_of_intent(worker, intent) == "canceled"


@pytest.mark.parametrize("customer", [GOOD, AUTH])
def test_after_a_restore_money_of_another_amount_is_for_a_person(
    worker: Worker, celery: Commands, stripe: Stripe, customer: str
) -> None:
    """And whatever they decide, what is still open of the record itself is canceled."""
    since = datetime.now(UTC).isoformat()
    if customer == GOOD:
        stripe.fault("http_429")
    worker.charge(customer)
    before = worker.record(customer)
    about = {"customer_id": customer, "billing_period": PERIOD, "billing_run": PERIOD}
    stripe.form(
        "/v1/payment_intents", amount=100, currency="usd", customer=customer,
        payment_method="pm_card_visa", confirm="true", off_session="true",
        **{f"metadata[{name}]": value for name, value in about.items()},
        **{"metadata[charge_key]": before.charge_key},
    )  # fmt: skip
    assert celery.json(*RECOVER, since)["charged"] == 0
    assert worker.record(customer).state is State.REVIEW
    worker.pass_time(1000)
    celery.done("ledger", "resolve", customer, PERIOD, "--not-charged", "--reason", "not ours")
    assert worker.record(customer).state is State.REJECTED
    if before.payment_intent_id is not None:
        assert status_of_intent(worker, before.payment_intent_id) == "canceled"


def test_after_a_restore_an_open_intent_of_a_later_epoch_is_known_again(
    worker: Worker, celery: Commands
) -> None:
    customer = "cus_decline_insufficient_funds_1"
    since = datetime.now(UTC).isoformat()
    worker.charge(customer)
    worker.recharge(customer, payment_method="pm_processing")
    assert worker.drive(customer) == State.PROCESSING
    now = worker.record(customer)
    statement(worker, "DELETE FROM charge_attempts WHERE attempt_epoch = 1")
    change(worker, customer, "state = 'card_declined', attempt_epoch = 0, payment_intent_id = NULL")
    assert celery.json(*RECOVER, since)["open"] == 1
    found = worker.record(customer)
    assert (found.state, found.attempt_epoch) == (State.PROCESSING, 1)
    assert found.payment_intent_id == now.payment_intent_id
    assert [record.charge_key for record, _ in worker.actions.take_polls(5)] == [now.charge_key]


def test_what_was_unsettled_in_the_copy_is_looked_up_at_both_endpoints(
    environment: dict[str, str], stripe: Stripe, celery: Commands
) -> None:
    """Guard: the endpoints of a record whose calls were lost with the restore are all listed."""
    worker = Worker(environment, stripe, **PATIENT, STRIPE_CHARGE_API="charges")
    worker.charge("cus_processing_1")
    change(
        worker, "cus_processing_1", "state = 'reserved', charge_id = NULL, next_attempt_at = NULL"
    )
    statement(worker, "DELETE FROM charge_attempts")
    since = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
    assert celery.json(*RECOVER, since)["looked_up"] == 1
    record = worker.record("cus_processing_1")
    assert (record.state, record.attempts) == (State.SENT, 1)
    assert worker.drive("cus_processing_1") == "processing"
    assert len(stripe.creates()) == 1
    worker.close()


def test_no_worker_starts_until_a_recovery_has_ended(
    worker: Worker, celery: Commands, stripe: Stripe, role: RoleStarter
) -> None:
    pin_deployment(worker.here.engine, "stripe-billing")
    stripe.fault("http_500", method="GET", path="/v1/payment_intents")
    line = celery.refused(*RECOVER, datetime.now(UTC).isoformat())
    assert "until then no worker starts" in line
    locked_out = role("worker", wait=False)
    assert locked_out.wait_exit() == 1
    assert "recovery" in locked_out.log()
    celery.done("ledger", "recover", "--since", datetime.now(UTC).isoformat())
    role("worker")


def test_a_recovery_from_before_there_was_stripe_is_not_begun(
    worker: Worker, celery: Commands
) -> None:
    pin_deployment(worker.here.engine, "stripe-billing")
    ended = celery.run(*RECOVER, "0001-01-01")
    assert (ended.returncode, "lies before 2000" in ended.stderr) == (2, True)
    assert not worker.here.reads.recovering()


def test_a_recovery_beside_running_workers_is_refused(
    worker: Worker, celery: Commands, role: RoleStarter
) -> None:
    role("worker")
    line = celery.refused("ledger", "recover", "--since", datetime.now(UTC).isoformat())
    assert line.startswith("stop all workers first: worker-1@")


def statement(worker: Worker, sql: str) -> None:
    with worker.here.engine.connect() as connection:
        connection.execute(text(sql))


def change(worker: Worker, customer: str, assignments: str) -> None:
    statement(worker, f"UPDATE billing_records SET {assignments} WHERE customer_id = '{customer}'")


def forget(worker: Worker, customer: str) -> None:
    key = charge_key(customer, PERIOD)
    for table in ("billing_records", "charge_attempts", "ledger_events"):
        statement(worker, f"DELETE FROM {table} WHERE charge_key = '{key}'")


# -- dead letters ------------------------------------------------------------------------


def bury(worker: Worker, body: object, reason: str = "invalid_event") -> int:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    letter = NewDeadLetter("nsq", "t/c", f"m{hash(raw)}", raw, DeadLetterReason(reason), "test")
    return DeadLetters(worker.here.engine).bury(letter)


def an_event(customer: str) -> dict[str, Any]:
    return {
        "customer_id": customer,
        "billing_period": PERIOD,
        "amount_cents": 2500,
        "stripe_customer_id": "cus_1",
    }


def test_a_replayed_letter_is_charged_once(
    worker: Worker, celery: Commands, role: RoleStarter, stripe: Stripe
) -> None:
    role("worker", wait=False, **PATIENT)
    letter = str(bury(worker, an_event("cust_1")))
    celery.done("dead-letters", "replay", letter, "--reason", "limit raised")
    wait_until(lambda: worker.record("cust_1").state is State.CHARGED, 60, "it is charged")
    line = celery.refused("dead-letters", "replay", letter, "--reason", "again")
    assert line == f"dead letter {letter} is resolved: replayed"
    assert len(stripe.charges()) == 1


def test_a_letter_that_cannot_be_replayed_is_left_as_it_is(
    worker: Worker, celery: Commands
) -> None:
    worker.charge(GOOD)
    refused = {
        bury(worker, {"customer_id": "x"}): "is still refused",
        bury(worker, an_event(GOOD)): "has a billing record already",
        bury(worker, an_event("cust_2"), "payload_conflict"): "its own billing_period",
        bury(worker, b"", "payload_lost"): "has no body",
    }
    for letter, why in refused.items():
        assert why in celery.refused("dead-letters", "replay", str(letter), "--reason", "x")
    assert celery.refused("dead-letters", "replay", "99", "--reason", "x") == "no dead letter 99"
    open_ones = DeadLetters(worker.here.engine).list(limit=10)
    assert [letter.id for letter in open_ones] == list(refused)
    assert worker.stripe.creates(charge_key=charge_key("cust_2", PERIOD)) == []


def test_a_letter_is_discarded_and_then_purged_down_to_its_hash(
    worker: Worker, celery: Commands
) -> None:
    letter = bury(worker, b"{")
    assert "open still" in celery.refused("dead-letters", "purge", str(letter), "--reason", "x")
    celery.done("dead-letters", "discard", str(letter), "--reason", "a test", OPERATOR="ann")
    assert "is resolved: discarded: a test" in celery.refused(
        "dead-letters", "discard", str(letter), "--reason", "x"
    )
    celery.done("dead-letters", "purge", str(letter), "--reason", "erasure")
    found = DeadLetters(worker.here.engine).show(letter)
    assert found is not None
    assert (found.body, found.resolved_by, found.body_size) == (None, "ann", 1)
    assert len(found.body_sha256) == 64
    assert "erasure" in str(found.resolution)


def test_old_letters_are_purged_together(worker: Worker, celery: Commands) -> None:
    letters = DeadLetters(worker.here.engine)
    resolved = [bury(worker, f"{{{number}".encode()) for number in range(3)]
    still_open = bury(worker, b"open")
    for letter in resolved:
        letters.discard(letter, actor="ann", reason="x")
    purge = ("dead-letters", "purge", "--reason", "retention", "--older-than-days")
    assert celery.done(*purge, "1") == "0 purged\n"
    worker.pass_time(86_400)
    assert celery.done(*purge, "1") == "3 purged\n"
    found = letters.show(still_open)
    assert found is not None
    assert found.body == b"open"
