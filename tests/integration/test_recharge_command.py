"""`celery -A tasks recharge` and the task behind `celery call`: who starts what, and only once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from models.keys import charge_key
from models.ledger_reads import LedgerReads
from models.states import State
from tests.support.commands import Commands
from tests.support.flows import PATIENT, PERIOD, Worker
from tests.support.roles import RoleStarter
from tests.support.stripe import Stripe
from tests.support.waiting import wait_until

DECLINED = "cus_decline_insufficient_funds_1"
LOST = "cus_decline_lost_card_1"
DONE_WITHIN_S = 60.0


@pytest.fixture
def worker(environment: dict[str, str], stripe: Stripe) -> Iterator[Worker]:
    made = Worker(environment, stripe, **PATIENT)
    yield made
    made.close()


@pytest.fixture
def celery(environment: dict[str, str], tmp_path: Path) -> Commands:
    return Commands(environment, tmp_path)


def test_two_shells_at_once_start_one_new_charge(
    worker: Worker, celery: Commands, stripe: Stripe, role: RoleStarter
) -> None:
    role("worker", **PATIENT)
    worker.charge(DECLINED)
    arguments = ("recharge", DECLINED, PERIOD, "--payment-method", "pm_card_visa")
    shells = [celery.start(*arguments) for _ in range(2)]
    ended = [(*shell.communicate(timeout=60), shell.returncode) for shell in shells]
    assert sorted(code for _, _, code in ended) == [0, 1], ended
    (line,) = [err for _, err, code in ended if code]
    assert line.startswith("chargebridge: "), line
    assert line.count("\n") == 1
    wait_until(
        lambda: worker.record(DECLINED).state is State.CHARGED, DONE_WITHIN_S, "it is charged"
    )
    assert len(stripe.charges()) == 1
    assert len(stripe.creates()) == 2, "the declined one and one new one"


def test_who_and_why_stand_in_the_audit(worker: Worker, celery: Commands) -> None:
    worker.charge(DECLINED)
    shown = celery.json("recharge", DECLINED, PERIOD, "--reason", "new card", OPERATOR="ann")
    history = LedgerReads(worker.here.engine).show(DECLINED, PERIOD)
    assert history is not None
    last = history.events[-1]
    assert (last["actor"], last["reason"], last["move"]) == ("ann", "new card", "recharge")
    assert last["request_id"] == shown["request_id"]
    assert (shown["state"], shown["attempt_epoch"]) == ("reserved", 1)


def test_a_hard_decline_wants_another_method_or_force(worker: Worker, celery: Commands) -> None:
    worker.charge(LOST)
    line = celery.refused("recharge", LOST, PERIOD)
    assert "lost_card" in line
    assert "--force" in line
    assert worker.record(LOST).attempt_epoch == 0
    celery.done("recharge", LOST, PERIOD, "--force")
    assert worker.record(LOST).attempt_epoch == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nobody", PERIOD), "no billing record of nobody"),
        ((DECLINED, "2027-Q1"), f"no billing record of {DECLINED} 2027-Q1"),
        ((DECLINED, PERIOD, "--payment-method", "visa"), "payment_method"),
        ((DECLINED, PERIOD, "--reason", " "), "a reason is needed"),
        ((DECLINED, PERIOD, "--from-epoch", "3"), "epoch 0"),
        (("cus_good_1", PERIOD), "charged"),
        (("--period", PERIOD, "--state", "card_declined", "--reason", ""), "a reason is needed"),
    ],
)
def test_what_cannot_be_is_one_line_and_changes_nothing(
    worker: Worker, celery: Commands, arguments: tuple[str, ...], says: str
) -> None:
    worker.charge(DECLINED)
    worker.charge("cus_good_1")
    assert says in celery.refused("recharge", *arguments)
    assert worker.record(DECLINED).attempt_epoch == 0


def test_wrong_usage_is_told_apart_from_a_refusal(celery: Commands) -> None:
    for arguments in [(), (DECLINED,), (DECLINED, PERIOD, "--period", PERIOD), ("--period", "x")]:
        assert celery.run("recharge", *arguments).returncode == 2


def test_what_was_started_before_the_ledger_went_away_is_shown(
    worker: Worker, celery: Commands
) -> None:
    customers = [f"cus_decline_insufficient_funds_{number}" for number in range(3)]
    for customer in customers:
        worker.charge(customer)
    *first, last = sorted(customers, key=lambda customer: charge_key(customer, PERIOD))
    with worker.here.engine.connect() as other:
        # Ours are ended when they do nothing for some seconds, and this one has to wait.
        other.execute(text("SET idle_in_transaction_session_timeout = 0"))
        other.execute(text("BEGIN"))
        locked = "SELECT FROM billing_records WHERE customer_id = :last FOR UPDATE"
        other.execute(text(locked), {"last": last})
        ended = celery.run("recharge", "--period", PERIOD, "--state", "card_declined", "--json")
        other.execute(text("ROLLBACK"))
    assert ended.returncode == 1
    assert ended.stderr.startswith("chargebridge: the ledger did not answer")
    assert [(row["customer_id"], row["result"]) for row in json.loads(ended.stdout)] == [
        (customer, "started") for customer in first
    ]


def test_a_record_that_is_charged_again_is_unsettled_since_then(
    worker: Worker, celery: Commands
) -> None:
    worker.charge(DECLINED)
    worker.pass_time(10 * 86_400)
    celery.done("recharge", DECLINED, PERIOD)
    reads = LedgerReads(worker.here.engine)
    assert reads.oldest_unsettled_s() == pytest.approx(0, abs=60)
    assert reads.count_unsettled(60, 10) == 0
    worker.pass_time(100)
    assert reads.count_unsettled(60, 10) == 1


def test_many_at_once_with_a_dry_run_a_limit_and_hard_declines_left_out(
    worker: Worker, celery: Commands
) -> None:
    soft = [f"cus_decline_insufficient_funds_{number}" for number in range(4)]
    for customer in [*soft, LOST]:
        worker.charge(customer)
    chosen = ("recharge", "--period", PERIOD, "--state", "card_declined")
    dry = celery.run(*chosen, "--dry-run", "--json")
    assert dry.returncode == 1
    assert "1 of 5 were not started" in dry.stderr
    assert dry.stdout.count('"would start"') == 4
    assert {worker.record(customer).attempt_epoch for customer in [*soft, LOST]} == {0}
    celery.run(*chosen, "--limit", "2")
    celery.run(*chosen)
    assert [worker.record(customer).attempt_epoch for customer in soft] == [1, 1, 1, 1]
    assert worker.record(LOST).attempt_epoch == 0
    celery.done(*chosen, "--force")
    assert worker.record(LOST).attempt_epoch == 1


def test_the_broker_may_be_away_the_sweep_publishes_it(
    worker: Worker, celery: Commands, role: RoleStarter
) -> None:
    worker.charge(DECLINED)
    away = "redis://127.0.0.1:1/0"
    ended = celery.run("recharge", DECLINED, PERIOD, "--force", CELERY_BROKER_URL=away)
    assert ended.returncode == 0, ended.stderr
    assert "the sweep will publish it" in ended.stderr
    for kind in ("worker", "worker-control", "beat"):
        role(kind, wait=False)
    wait_until(
        lambda: (
            worker.record(DECLINED).state is State.CARD_DECLINED
            and worker.record(DECLINED).attempt_epoch == 1
        ),
        DONE_WITHIN_S,
        "the sweep has driven the recharge",
    )


def test_celery_call_starts_a_recharge_once_however_often_it_is_delivered(
    worker: Worker, celery: Commands, role: RoleStarter, stripe: Stripe
) -> None:
    worker.charge(DECLINED)
    for _ in range(3):
        celery.done(
            "call",
            "tasks.recharge",
            "--args",
            f'["{DECLINED}", "{PERIOD}", 0, "new card", "pm_card_visa", "click-1"]',
        )
    celery.done("call", "tasks.recharge", "--args", f'["{DECLINED}", "{PERIOD}", 0, "x", "pm_y"]')
    control = role("worker-control")
    role("worker", **PATIENT)
    wait_until(
        lambda: worker.record(DECLINED).state is State.CHARGED, DONE_WITHIN_S, "it is charged"
    )
    wait_until(
        lambda: "recharge_failed" in control.log(), DONE_WITHIN_S, "another request was refused"
    )
    assert worker.record(DECLINED).attempt_epoch == 1
    assert len(stripe.charges()) == 1
    assert len(stripe.creates(charge_key=charge_key(DECLINED, PERIOD))) == 2
