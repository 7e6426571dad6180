"""Guards: in another Stripe account or namespace nothing is decided, by whatever door."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from models.dead_letters import DeadLetters, NewDeadLetter
from models.errors import DeadLetterReason
from models.states import State
from sandbox import binaries, health
from sandbox.ports import free_port
from tasks.deployment import pin_deployment
from tests.support.commands import Commands
from tests.support.flows import PATIENT, PERIOD, Worker
from tests.support.stripe import Stripe
from tests.support.vault import VaultStarter, refused_start
from tests.support.waiting import wait_until

CUSTOMER = "cus_good_1"
ANOTHER = "is not the one this database was started with"
OTHER_NAMESPACE = {"CHARGE_NAMESPACE": "other"}


@pytest.fixture
def worker(environment: dict[str, str], stripe: Stripe) -> Iterator[Worker]:
    """A worker whose deployment is pinned, as one that has started."""
    made = Worker(environment, stripe, **PATIENT)
    pin_deployment(made.here)
    yield made
    made.close()


@pytest.fixture
def celery(environment: dict[str, str], tmp_path: Path) -> Commands:
    return Commands(environment, tmp_path)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The settings of somebody who holds a key of another account."""
    with another_simulator(tmp_path, free_port()) as settings:
        yield settings


@contextmanager
def another_simulator(folder: Path, port: int) -> Iterator[dict[str, str]]:
    """A Stripe where the key is of another account."""
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "sandbox.stripe_simulator", "--port", str(port)),
            *("--state", str(folder / "other"), "--account-id", "acct_other"),
        ],
        cwd=binaries.CHECKOUT,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: health.answers(f"{url}/_sim/charges") is None, 30, "it answers")
        yield {"STRIPE_API_BASE": url, "STRIPE_API_KEY": "sk_test_other"}
    finally:
        process.kill()
        process.wait()


def test_nothing_is_recovered_or_reconciled_from_another_account(
    worker: Worker, celery: Commands, elsewhere: dict[str, str]
) -> None:
    assert worker.charge(CUSTOMER) == State.CHARGED
    worker.forget(CUSTOMER)
    since = datetime.now(UTC).isoformat()
    assert ANOTHER in celery.refused("ledger", "recover", "--force", "--since", since, **elsewhere)
    assert ANOTHER in celery.refused("reconcile", PERIOD, **elsewhere)
    assert not worker.here.reads.recovering(), "nothing was begun"
    started = celery.refused("worker", "-Q", "charges", "-c", "1", **elsewhere)
    assert started == f"STRIPE_API_KEY (account) {ANOTHER}"


def test_no_record_is_closed_by_what_another_account_shows(
    worker: Worker, celery: Commands, stripe: Stripe, elsewhere: dict[str, str]
) -> None:
    stripe.fault("http_500", stage="after_commit", customer=CUSTOMER)
    assert worker.charge(CUSTOMER) == State.SENT
    assert worker.ledger.give_up(worker.record(CUSTOMER), "test")
    worker.pass_time(1000)
    resolve = ("ledger", "resolve", CUSTOMER, PERIOD, "--not-charged", "--reason", "test")
    assert ANOTHER in celery.refused(*resolve, **elsewhere)
    nobody = {"STRIPE_API_BASE": f"http://127.0.0.1:{free_port()}"}
    assert "whose account this is" in celery.refused(*resolve, **nobody)
    assert "Stripe shows" in celery.refused(*resolve)
    assert worker.charge("cus_decline_expired_card") == State.CARD_DECLINED
    void = ("ledger", "void", "cus_decline_expired_card", PERIOD, "--reason", "test")
    assert ANOTHER in celery.refused(*void, **elsewhere)
    # What Stripe has never heard of can be voided while nobody can be asked.
    celery.done("ledger", "void", "cust_new", PERIOD, "--reason", "test", **nobody)


def test_nothing_is_written_under_another_namespace(worker: Worker, celery: Commands) -> None:
    event = {
        "customer_id": "cust_7",
        "billing_period": PERIOD,
        "amount_cents": 2500,
        "stripe_customer_id": "cus_7",
    }
    letter = NewDeadLetter(
        "nsq",
        "billing-events/stripe-processor",
        "m1",
        json.dumps(event).encode(),
        DeadLetterReason.INVALID_EVENT,
        "test",
    )
    letter_id = DeadLetters(worker.here.engine).bury(letter)
    for command in (
        ("dead-letters", "replay", str(letter_id), "--reason", "test"),
        ("ledger", "void", "cust_8", PERIOD, "--reason", "test"),
        ("ledger", "recover", "--force", "--since", datetime.now(UTC).isoformat()),
        ("reconcile", PERIOD),
    ):
        assert f"CHARGE_NAMESPACE {ANOTHER}" in celery.refused(*command, **OTHER_NAMESPACE)
    assert worker.here.reads.list(limit=10) == []


def test_a_vault_with_a_key_of_another_account_does_not_start(
    worker: Worker, vault_starter: VaultStarter, elsewhere: dict[str, str]
) -> None:
    vault = vault_starter()
    assert refused_start({**vault.env, **elsewhere}) == (
        f"chargebridge: STRIPE_API_KEY (account) {ANOTHER}"
    )
    vault.stop()
    # An outage of Stripe's keeps no vault from its start.
    vault_starter(STRIPE_API_BASE=f"http://127.0.0.1:{free_port()}")


def test_a_vault_that_started_during_an_outage_asks_until_stripe_says_whose_key_it_is(
    worker: Worker, vault_starter: VaultStarter, tmp_path: Path
) -> None:
    port = free_port()
    vault = vault_starter(STRIPE_API_BASE=f"http://127.0.0.1:{port}", STRIPE_API_KEY="sk_test_o")
    log = vault.log
    wait_until(lambda: "account_not_read" in log.read_text(), 30, "it has asked in vain")
    with another_simulator(tmp_path, port):
        wait_until(lambda: not vault.is_alive(), 30, "it ends at Stripe's first answer")
    assert f"STRIPE_API_KEY (account) {ANOTHER}" in log.read_text()
    assert "Traceback" not in log.read_text()
