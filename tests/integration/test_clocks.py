"""The database's clock: compared before a start, watched, and got over when it was wrong."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy.engine import Engine

import tasks.alarms
from models.clocks import check_clock, clock_off_s
from models.errors import ConfigurationError
from models.ledger import Ledger
from models.limits import MAX_CLOCK_OFF_S
from models.states import State
from sandbox import binaries, clock, roles
from tasks.recover import Recovery
from tasks.sweep import watch_clock
from tests.support.flows import PATIENT, Worker
from tests.support.ledgers import event, new_record
from tests.support.stripe import Stripe
from tests.support.vault import VaultProcess

PAYS, DECLINED = "cus_good_1", "cus_decline_expired_card"
TWO_DAYS_S = 48 * 3600.0
# A host whose clock is an hour ahead, as Python sees it.
AN_HOUR_AHEAD = """
import runpy, sys, time
right = time.time
time.time = lambda: right() + 3600
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
WORKER = ("celery", "-A", "tasks", "worker", "-Q", "charges", "-c", "1")


@pytest.fixture
def worker(environment: dict[str, str], stripe: Stripe) -> Iterator[Worker]:
    made = Worker(environment, stripe, **PATIENT)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _silent_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alarms that ring seldom have not rung yet."""
    monkeypatch.setattr(tasks.alarms, "_rung_at_s", {})


def test_a_clock_that_is_off_is_refused(engine: Engine) -> None:
    assert abs(clock_off_s(engine)) < MAX_CLOCK_OFF_S
    check_clock(engine)
    with pytest.raises(ConfigurationError, match="the database's clock is 1000 s ahead of"):
        check_clock(engine, lambda: time.time() - 1000)
    with pytest.raises(ConfigurationError, match="the database's clock is 1000 s behind"):
        check_clock(engine, lambda: time.time() + 1000)


@pytest.mark.parametrize("command", [WORKER, ("vault", "serve")], ids=["worker", "vault"])
def test_neither_workers_nor_the_vault_start_with_it(
    environment: dict[str, str], vault: VaultProcess, command: tuple[str, ...]
) -> None:
    settings = vault.env if command[0] == "vault" else environment
    done = subprocess.run(
        [sys.executable, "-c", AN_HOUR_AHEAD, *command],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**roles.base_environment(binaries.CHECKOUT), **settings},
        cwd=binaries.CHECKOUT,
    )
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("chargebridge: DATABASE_URL: the database's clock is 3600 s behind")


def test_the_sweep_rings_while_it_is_off_and_while_records_are_from_the_future(
    engine: Engine, ledger: Ledger, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    watch_clock(engine)
    assert "alarm_clock" not in caplog.text
    watch_clock(engine, lambda: time.time() - 1000)
    assert caplog.text.count("alarm_clock") == 1
    tasks.alarms._rung_at_s.clear()
    clock.advance(database_url, TWO_DAYS_S)
    ledger.reserve(new_record(event()), "test", 0)
    watch_clock(engine)
    assert caplog.text.count("alarm_clock") == 1, "the sandbox may move the ledger's clock"
    clock.advance(database_url, -TWO_DAYS_S)
    watch_clock(engine)
    assert caplog.text.count("alarm_clock") == 2


def test_after_a_recovery_nothing_is_sent_that_a_wrong_clock_made_look_fresh(
    worker: Worker, stripe: Stripe
) -> None:
    """Guard: the first send of a recovered record also says from when on Stripe is listed."""
    url = worker.environment["DATABASE_URL"]
    clock.advance(url, TWO_DAYS_S)
    for customer in (PAYS, DECLINED):
        stripe.fault("reset", stage="after_commit", customer=customer)
        assert worker.charge(customer) == State.SENT
    clock.advance(url, -TWO_DAYS_S)
    assert worker.drive(PAYS) == "leave:not_due"
    since = datetime.now(UTC) - timedelta(hours=1)
    Recovery(worker.actions, worker.here.gateway, worker.here.settings).run(since)
    worker.pass_time(worker.limits.proof_of_absence_s)
    assert worker.drive(PAYS) == "skip:charged"
    assert worker.drive(DECLINED) == State.CARD_DECLINED
    worker.pass_time(TWO_DAYS_S)
    assert worker.drive(DECLINED) == "skip:card_declined"
    assert len(stripe.creates()) == 2
