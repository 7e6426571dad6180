"""A billing run reconciled: expected events, the ledger and Stripe held against each other."""

from __future__ import annotations

import csv
import io
import json
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import text

from models.keys import charge_key
from models.states import State
from tasks.reconcile import reconciliation
from tests.support.commands import Commands
from tests.support.flows import PATIENT, PERIOD, Worker
from tests.support.roles import RoleStarter
from tests.support.stripe import Stripe
from tests.support.waiting import wait_until

GOOD = "cus_good_1"


@pytest.fixture
def worker(environment: dict[str, str], stripe: Stripe) -> Iterator[Worker]:
    made = Worker(environment, stripe, **PATIENT)
    yield made
    made.close()


@pytest.fixture
def celery(environment: dict[str, str], tmp_path: Path) -> Commands:
    return Commands(environment, tmp_path)


def expected(customer: str, **fields: Any) -> dict[str, Any]:
    return {
        "customer_id": customer,
        "billing_period": PERIOD,
        "amount_cents": 2500,
        "stripe_customer_id": customer,
        **fields,
    }


def file_of(path: Path, *lines: dict[str, Any] | str) -> str:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{line}\n" for line in texts))
    return str(path)


def verdicts(shown: dict[str, Any]) -> dict[str, str]:
    return {line["customer_id"]: line["verdict"] for line in shown["lines"]}


def test_n8_what_was_lost_never_published_or_wrong_is_named_and_made_good(
    worker: Worker, celery: Commands, tmp_path: Path, role: RoleStarter, stripe: Stripe
) -> None:
    customers = [f"cus_good_{number}" for number in range(4)]
    for customer in customers:
        worker.charge(customer)
    worker.forget(customers[0])
    never = '{ "customer_id": "cus_never", "billing_period": "2026-Q3", "amount_cents": 700, '
    never += '"stripe_customer_id": "cus_never", "unknown": 1.5 }'
    wrong = expected(customers[1], amount_cents=2600)
    path = file_of(
        tmp_path / "run.jsonl", *(expected(c) for c in customers if c != customers[1]), wrong, never
    )
    shown = celery.json("reconcile", PERIOD, "--expected", path, "--republish", "redis")
    assert verdicts(shown) == {
        customers[0]: "found",
        customers[1]: "wrong_amount",
        customers[2]: "found",
        customers[3]: "found",
        "cus_never": "missing",
    }
    assert (shown["adopted"], shown["republished"], shown["closable"]) == (1, 1, False)
    assert shown["summary"] == (f"run {PERIOD} must not be closed: 1 missing, 1 wrong amount")
    adopted = worker.record(customers[0])
    (charge,) = worker.charges(customers[0])
    assert (adopted.state, adopted.charge_id) == (State.CHARGED, charge["id"])
    with redis.Redis.from_url(worker.environment["REDIS_URL"]) as client:
        ((_, entry),) = client.xrange(worker.environment["REDIS_STREAM"])
    assert entry[b"payload"] == never.encode(), "the original bytes"
    role("worker", **PATIENT)
    role("bridge-redis")
    wait_until(
        lambda: (
            charge_key("cus_never", PERIOD)
            in worker.ledger.read_statuses([charge_key("cus_never", PERIOD)])
            and worker.record("cus_never").state is State.CHARGED
        ),
        60,
        "what was republished is charged",
    )
    assert len(stripe.charges()) == 5
    fixed = file_of(tmp_path / "fixed.jsonl", *(expected(c) for c in customers), never)
    told = celery.done("reconcile", PERIOD, "--expected", fixed)
    assert told.splitlines()[-1] == f"run {PERIOD} may be closed"


def test_everything_that_is_not_plain_is_told_apart(
    worker: Worker, celery: Commands, tmp_path: Path, stripe: Stripe
) -> None:
    for customer in (GOOD, "cus_extra", "cus_decline_x", "cus_auth_1", "cus_processing_1"):
        worker.charge(customer)
    worker.charge("cus_refunded")
    stripe.refund(worker.charges("cus_refunded")[0]["id"], 500)
    stripe.fault("reset", customer="cus_unknown", stage="after_claim")
    worker.charge("cus_unknown")
    stripe.fault("reset", customer="cus_late", stage="after_commit")
    worker.charge("cus_late")
    worker.charge("cus_twice")
    key = charge_key("cus_twice", PERIOD)
    stripe.charge_elsewhere("cus_twice", 2500, charge_key=key, billing_run=PERIOD)
    worker.charge("cus_auth_lost")
    worker.forget("cus_auth_lost")
    stripe.charge_elsewhere("cus_other", 100, charge_key="0" * 32, billing_run="another")
    names = [
        c["customer"] for c in stripe.charges() if c["customer"] not in ("cus_extra", "cus_other")
    ]
    names += ["cus_decline_x", "cus_auth_1", "cus_processing_1", "cus_unknown", "cus_auth_lost"]
    path = file_of(tmp_path / "e.jsonl", *(expected(name) for name in dict.fromkeys(names)))
    shown = celery.json("reconcile", PERIOD, "--expected", path)
    assert verdicts(shown) == {
        GOOD: "found",
        "cus_extra": "extra",
        "cus_decline_x": "not_charged",
        "cus_auth_1": "not_charged",
        "cus_processing_1": "processing",
        "cus_refunded": "found",
        "cus_unknown": "unsettled",
        "cus_late": "found",
        "cus_twice": "double_charge",
        "cus_auth_lost": "open_at_stripe",
    }
    (refunded,) = [line for line in shown["lines"] if line["refunded_cents"]]
    assert (refunded["customer_id"], refunded["refunded_cents"]) == ("cus_refunded", 500)
    assert worker.record("cus_late").state is State.CHARGED, "adopted, though it was unsettled"
    assert not shown["closable"]
    told = celery.run("reconcile", PERIOD, "--expected", path, "--csv")
    rows = list(csv.DictReader(io.StringIO(told.stdout)))
    assert {row["customer_id"]: row["verdict"] for row in rows} == verdicts(shown)
    assert told.stderr.strip().endswith(shown["summary"])
    told = celery.done("reconcile", PERIOD, "--expected", path)
    assert told.splitlines()[-1] == shown["summary"]
    assert "refunded: 1" in told


def test_an_open_intent_whose_record_was_lost_is_not_published_again(
    worker: Worker, celery: Commands, tmp_path: Path
) -> None:
    worker.charge("cus_auth_1")
    worker.forget("cus_auth_1")
    path = file_of(tmp_path / "e.jsonl", expected("cus_auth_1"))
    shown = celery.json("reconcile", PERIOD, "--expected", path, "--republish", "nsq")
    assert (shown["republished"], verdicts(shown)) == (0, {"cus_auth_1": "open_at_stripe"})


def test_money_that_carries_no_more_than_the_charge_key_is_for_a_person(
    worker: Worker, celery: Commands, stripe: Stripe
) -> None:
    stripe.fault("http_429")
    assert worker.charge(GOOD).startswith("reserved")
    stripe.charge_elsewhere(GOOD, 2500, charge_key=charge_key(GOOD, PERIOD))
    assert celery.json("reconcile", PERIOD)["closable"] is False
    assert worker.record(GOOD).state is State.REVIEW


@pytest.mark.parametrize("fields", [{"amount": 1000}, {"amount": 2500, "currency": "eur"}])
def test_money_of_another_amount_is_for_a_person_and_not_adopted(
    worker: Worker, celery: Commands, stripe: Stripe, fields: dict[str, Any]
) -> None:
    stripe.fault("http_429")
    assert worker.charge(GOOD).startswith("reserved")
    key = charge_key(GOOD, PERIOD)
    about = {"customer_id": GOOD, "billing_period": PERIOD, "billing_run": PERIOD}
    taken = stripe.charge_elsewhere(GOOD, **fields, charge_key=key, **about)
    for _ in range(2):
        shown = celery.json("reconcile", PERIOD)
        assert (shown["adopted"], shown["closable"]) == (0, False)
        assert verdicts(shown) == {GOOD: "wrong_amount"}
        record = worker.record(GOOD)
        assert (record.state, record.payment_intent_id) == (State.REVIEW, taken["id"])


def test_money_for_an_identity_that_was_voided_before_it_came_is_for_a_person(
    worker: Worker, celery: Commands, tmp_path: Path
) -> None:
    worker.charge("cus_voided")
    worker.forget("cus_voided")
    celery.done("ledger", "void", "cus_voided", PERIOD, "--reason", "not to be charged")
    assert worker.record("cus_voided").amount_cents is None, "a tombstone"
    path = file_of(tmp_path / "e.jsonl", expected("cus_voided"))
    shown = celery.json("reconcile", PERIOD, "--expected", path)
    assert not shown["closable"]
    record = worker.record("cus_voided")
    (charge,) = worker.charges("cus_voided")
    assert (record.state, record.charge_id) == (State.REVIEW, charge["id"])
    assert (record.amount_cents, record.currency, record.billing_run) == (2500, "usd", PERIOD)
    celery.done(
        "ledger", "resolve", "cus_voided", PERIOD, "--charged", charge["id"], "--reason", "kept"
    )
    assert worker.record("cus_voided").state is State.CHARGED


def test_what_was_voided_before_it_came_can_be_charged_after_all(
    worker: Worker, celery: Commands, stripe: Stripe
) -> None:
    """Guard: a recharge needs an event, and a tombstone has none."""
    celery.done("ledger", "void", GOOD, PERIOD, "--reason", "by mistake")
    about = {"customer_id": GOOD, "billing_period": PERIOD, "billing_run": PERIOD}
    taken = stripe.charge_elsewhere(GOOD, 2500, charge_key=charge_key(GOOD, PERIOD), **about)
    celery.done("reconcile", PERIOD)
    assert worker.record(GOOD).state is State.REVIEW
    assert taken["status"] == "succeeded"
    with worker.here.engine.connect() as connection:
        connection.execute(text("UPDATE billing_records SET state = 'rejected'"))
    stripe.reset()
    worker.recharge(GOOD, payment_method="pm_card_visa")
    assert worker.drive(GOOD) == State.CHARGED
    assert len(worker.charges(GOOD)) == 1


def test_an_imported_charge_is_found_though_it_carries_no_metadata(
    worker: Worker, celery: Commands, tmp_path: Path, stripe: Stripe
) -> None:
    old = stripe.charge_elsewhere("cus_old", 2500)
    stripe.clock(60 * 86_400)
    line = {**expected("cus_old"), "currency": "usd", "charge_id": old["latest_charge"]}
    celery.done("ledger", "import", file_of(tmp_path / "old.jsonl", line))
    worker.charge(GOOD)
    shown = celery.json("reconcile", PERIOD)
    assert verdicts(shown) == {"cus_old": "found", GOOD: "found"}
    assert shown["closable"]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("{", "the body is not JSON"),
        (expected("cus_x", amount_cents="1"), "amount_cents"),
        (expected("cus_x", billing_run="another"), "belongs to another billing run"),
        (expected(GOOD, amount_cents=1), "contradicts the money fields of line 1"),
    ],
)
def test_one_bad_line_is_named_and_nothing_changes(
    worker: Worker, celery: Commands, tmp_path: Path, bad: Any, why: str
) -> None:
    worker.charge(GOOD)
    worker.forget(GOOD)
    path = file_of(tmp_path / "e.jsonl", expected(GOOD), expected(GOOD), bad)
    line = celery.refused("reconcile", PERIOD, "--expected", path, "--republish", "nsq")
    assert line.startswith(f"{path}:3: ")
    assert why in line
    assert worker.ledger.read(charge_key(GOOD, PERIOD)).record is None


def test_without_stripes_whole_list_nothing_is_published(
    worker: Worker, celery: Commands, tmp_path: Path, stripe: Stripe
) -> None:
    path = file_of(tmp_path / "e.jsonl", expected("cus_never"))
    stripe.fault("http_500", method="GET", path="/v1/charges")
    line = celery.refused("reconcile", PERIOD, "--expected", path, "--republish", "redis")
    assert "nothing was changed" in line
    with redis.Redis.from_url(worker.environment["REDIS_URL"]) as client:
        assert client.xlen(worker.environment["REDIS_STREAM"]) == 0


def test_a_run_that_nobody_knows_is_refused(worker: Worker, celery: Commands) -> None:
    worker.charge(GOOD)
    line = celery.refused("reconcile", "2026-Q33")
    assert line.startswith("nothing is known of the billing run 2026-Q33")
    celery.done("run", "open", "2026-Q33", "--currency", "usd", "--expected-total-cents", "100")
    assert celery.done("reconcile", "2026-Q33") == "run 2026-Q33 may be closed\n"


def test_wrong_usage(celery: Commands) -> None:
    assert celery.run("reconcile").returncode == 2
    assert celery.run("reconcile", PERIOD, "--republish", "nsq").returncode == 2


def test_the_task_adopts_and_tells_the_last_line(
    worker: Worker, celery: Commands, role: RoleStarter
) -> None:
    worker.charge(GOOD)
    worker.charge("cus_good_2")
    worker.forget(GOOD)
    control = role("worker-control")
    celery.done("call", "tasks.reconcile", "--args", f'["{PERIOD}"]')
    wait_until(lambda: f"run {PERIOD} may be closed" in control.log(), 60, "it has reconciled")
    assert worker.record(GOOD).state is State.CHARGED


@pytest.mark.timeout(300)
def test_a_hundred_thousand_expected_lines_in_flat_memory(worker: Worker, tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    with path.open("w") as file:
        for number in range(100_000):
            file.write(json.dumps(expected(f"cus_{number}", description="d" * 200)) + "\n")
    with reconciliation(worker.here, PERIOD, "test") as work:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begun = time.monotonic()
        work.run(path)
        assert work.summary().counts == {"missing": 100_000}
        took_s = time.monotonic() - begun
        grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{took_s:.1f} s, {grown_mib:.1f} MiB more", file=sys.stderr)
    assert grown_mib < 64
