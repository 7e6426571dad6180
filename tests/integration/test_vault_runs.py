"""Billing runs: their budgets, their one key, what closing waits for, and their commands."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet
from sqlalchemy import text
from sqlalchemy.engine import Engine

from models import billing_runs_sql
from models.billing_runs import MAX_CLOSING_S, BillingRuns, RunState
from models.database import make_engine, rows
from models.errors import (
    AmountRefused,
    ConfigurationError,
    LedgerUnavailable,
    NotFound,
    StateForbids,
)
from models.ledger import Ledger, Retry
from models.outcomes import OutcomeKind
from models.run_keys import RunKeys
from models.settings import load_settings
from models.vault_wire import VaultUnavailable, VaultWire
from sandbox import clock
from sandbox.ports import free_port
from tests.support.commands import Commands
from tests.support.ledgers import claimed, event, new_record, outcome
from tests.support.roles import RoleStarter
from tests.support.stripe import Stripe
from tests.support.vault import ADMIN_KEY, RUN, Books, VaultProcess
from tests.support.waiting import wait_until

EXPECTED = 100_000
CAP = 110_000
KEYS = Fernet.generate_key().decode()


@pytest.fixture
def runs(engine: Engine) -> BillingRuns:
    return BillingRuns(engine, "test")


@pytest.fixture
def keys(runs: BillingRuns) -> RunKeys:
    return RunKeys(runs, KEYS)


def test_a_run_is_opened_once_with_a_tenth_above_what_is_expected(runs: BillingRuns) -> None:
    run = runs.open(RUN, "USD", EXPECTED)
    assert (run.currency, run.cap_cents, run.state) == ("usd", CAP, RunState.OPEN)
    assert runs.open(RUN, "usd", EXPECTED).id == run.id
    with pytest.raises(StateForbids, match="another expected total"):
        runs.open(RUN, "usd", EXPECTED + 1)
    assert runs.open("odd", "usd", 101).cap_cents == 111
    with pytest.raises(AmountRefused):
        runs.open(RUN, "xyz", EXPECTED)
    with pytest.raises(NotFound):
        runs.get("none", "usd")


def test_currencies_are_budgets_of_their_own(runs: BillingRuns) -> None:
    runs.open(RUN, "usd", EXPECTED)
    runs.open(RUN, "jpy", 500)
    assert [(run.currency, run.cap_cents) for run in runs.list(billing_run=RUN)] == [
        ("usd", CAP),
        ("jpy", 550),
    ]


def test_many_that_ask_at_once_open_one_run_with_one_key(database_url: str, books: Books) -> None:
    # Sessions without limits: nobody is refused because another's commit was long in coming.
    settings = load_settings({"DATABASE_URL": database_url, "DATABASE_POOLED": "yes"})
    engine = make_engine(settings, pool_size=8)
    runs = BillingRuns(engine, "test")
    keys = RunKeys(runs, KEYS)

    def ask(_: int) -> str:
        return keys.of(runs.find_or_open(RUN, "usd", EXPECTED)).vault_key

    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(ask, range(24)))
    engine.dispose()
    assert len(found) == 1
    assert len(books.keys()) == 1
    assert found.pop() not in books.everything()


def test_raising_needs_a_reason_and_never_lowers(runs: BillingRuns) -> None:
    runs.open(RUN, "usd", EXPECTED)
    with pytest.raises(StateForbids, match="reason"):
        runs.raise_cap(RUN, "usd", 2 * EXPECTED, " ")
    assert runs.raise_cap(RUN, "usd", 2 * EXPECTED, "new customer").cap_cents == 2 * CAP
    for less in (2 * EXPECTED, EXPECTED):
        with pytest.raises(StateForbids, match="only ever raised"):
            runs.raise_cap(RUN, "usd", less, "mistake")


def test_renewing_gives_a_new_key_and_no_new_money(
    runs: BillingRuns, keys: RunKeys, vault: VaultProcess
) -> None:
    old = keys.of(runs.open(RUN, "usd", 2273)).vault_key
    assert vault.create(old, "c1").status == 200
    new = keys.renew(RUN, "usd").vault_key
    assert new != old
    assert vault.create(new, "c2").code == "over_cap"
    assert vault.create(old, "c3").code == "key_expired"
    assert vault.create(old, "c1").json["status"] == "succeeded"
    found = keys.find(RUN, "usd")
    assert found is not None
    assert found.vault_key == new
    assert keys.find("none", "usd") is None
    opened = keys.find("none", "usd", auto_open_expected_cents=EXPECTED)
    assert opened is not None
    assert opened.run.cap_cents == CAP


def test_keys_survive_the_rotation_of_their_encryption(runs: BillingRuns, keys: RunKeys) -> None:
    key = keys.of(runs.open(RUN, "usd", EXPECTED)).vault_key
    newer = Fernet.generate_key().decode()
    rotated = RunKeys(runs, f"{newer},{KEYS}")
    assert rotated.reencrypt() == 1
    found = RunKeys(runs, newer).find(RUN, "usd")
    assert found is not None
    assert found.vault_key == key
    with pytest.raises(ConfigurationError, match="VAULT_ENCRYPTION_KEYS"):
        keys.find(RUN, "usd")
    for bad in ("", "x", "a,b"):
        with pytest.raises(ConfigurationError, match="VAULT_ENCRYPTION_KEYS"):
            RunKeys(runs, bad)


def test_a_run_closes_only_when_nothing_is_left_in_it(
    runs: BillingRuns, keys: RunKeys, ledger: Ledger, vault: VaultProcess, stripe: Stripe
) -> None:
    key = keys.of(runs.open(RUN, "usd", EXPECTED)).vault_key
    claim = claimed(ledger, new_record(event(billing_period=RUN)))
    with pytest.raises(StateForbids, match="1 unsettled"):
        runs.close(RUN, "usd")
    assert runs.get(RUN, "usd").state is RunState.OPEN
    ledger.record_outcome(
        claim, outcome(OutcomeKind.PROCESSING, payment_intent_id="pi_1"), Retry(0)
    )
    with pytest.raises(StateForbids, match="1 processing"):
        runs.close(RUN, "usd")
    ledger.late_truth(claim.record.charge_key, outcome())
    stripe.fault("reset", stage="after_claim")
    vault.create(key, "c1")
    with pytest.raises(StateForbids, match="1 held"):
        runs.close(RUN, "usd")
    assert vault.resolve("c1", "failed").status == 200
    assert runs.close(RUN, "usd").state is RunState.CLOSED
    assert runs.close(RUN, "usd").state is RunState.CLOSED
    assert vault.create(key, "c2").code == "run_closed"
    with pytest.raises(StateForbids, match="closed"):
        runs.open(RUN, "usd", EXPECTED)
    with pytest.raises(StateForbids, match="closed"):
        runs.raise_cap(RUN, "usd", 2 * EXPECTED, "x")
    assert runs.reopen(RUN, "usd", "a late customer").state is RunState.OPEN
    assert vault.create(key, "c2").status == 200
    with pytest.raises(StateForbids, match="not closed"):
        runs.reopen(RUN, "usd", "x")


def test_closing_that_breaks_off_leaves_the_run_open(runs: BillingRuns, engine: Engine) -> None:
    runs.open(RUN, "usd", EXPECTED)
    with engine.connect() as other:
        other.execute(text("BEGIN"))
        # The lock is held for as long as the test takes, however long that is.
        other.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))
        other.execute(text("LOCK TABLE vault_holds IN ACCESS EXCLUSIVE MODE"))
        with pytest.raises(LedgerUnavailable):
            runs.close(RUN, "usd")
        assert runs.get(RUN, "usd").state is RunState.OPEN
        other.execute(text("ROLLBACK"))
    assert runs.close(RUN, "usd").state is RunState.CLOSED


def test_a_run_whose_closer_was_killed_is_opened_again_after_a_while(
    runs: BillingRuns, engine: Engine, database_url: str, role: RoleStarter
) -> None:
    run = runs.open(RUN, "usd", EXPECTED)
    begun = {"id": run.id, "move": "closing", "actor": "killed", "reason": None}
    rows(engine, billing_runs_sql.BEGIN_CLOSING, begun)
    assert runs.reopen_abandoned() == 0
    clock.advance(database_url, MAX_CLOSING_S)
    role("worker-control")
    role("beat")
    wait_until(lambda: runs.get(RUN, "usd").state is RunState.OPEN, 60, "the sweep opens it again")


def test_the_report_says_what_will_still_be_asked_for(
    runs: BillingRuns, keys: RunKeys, ledger: Ledger, vault: VaultProcess, stripe: Stripe
) -> None:
    key = keys.of(runs.open(RUN, "usd", 6000)).vault_key
    records = [new_record(event(f"cust_{n}", RUN)) for n in range(3)]
    claims = [claimed(ledger, record) for record in records]
    vault.create(key, records[0].charge_key)
    ledger.record_outcome(claims[0], outcome(), Retry(0))
    stripe.fault("reset", stage="after_claim")
    vault.create(key, records[1].charge_key)
    report = runs.report(RUN, "usd")
    assert (report.run.settled_cents, report.run.held_cents) == (2500, 2500)
    assert (report.charged.records, report.unsettled.records) == (1, 2)
    assert report.not_held_cents == 2500
    assert report.forecast_cents == 7500
    assert not report.cap_will_hold
    assert runs.raise_cap(RUN, "usd", 7000, "more").free_cents == 2700
    assert runs.report(RUN, "usd").cap_will_hold


def test_the_wire_client_resolves_holds(vault: VaultProcess, books: Books) -> None:
    wire = VaultWire(vault.url, ADMIN_KEY)
    vault.create(vault.issue(), "c1", idempotency_key="c/1")
    assert wire.resolve("c/1", "settled", payment_intent_id="pi_1")
    assert not wire.resolve("unheard-of", "failed")
    with pytest.raises(StateForbids):
        wire.resolve("c/1", "absent")
    with pytest.raises(VaultUnavailable):
        VaultWire(vault.url, "wrong-admin-key").resolve("c/1", "settled")
    with pytest.raises(VaultUnavailable):
        VaultWire(f"http://127.0.0.1:{free_port()}", ADMIN_KEY).resolve("c/1", "settled")
    wire.close()


def test_the_hosted_client_asks_over_the_wire_and_for_dollars_only(
    runs: BillingRuns, vault: VaultProcess
) -> None:
    wire = VaultWire(vault.url, ADMIN_KEY)
    hosted = RunKeys(runs, KEYS, wire.issue)
    key = hosted.of(runs.open(RUN, "usd", EXPECTED)).vault_key
    fields = {"run": f"{RUN}/usd"}
    assert vault.create(key, "c1", **fields).status == 200  # type: ignore[arg-type]
    with pytest.raises(StateForbids, match="US dollars"):
        hosted.of(runs.open(RUN, "eur", EXPECTED))
    wire.close()


# -- commands ----------------------------------------------------------------------------


@pytest.fixture
def celery(environment: dict[str, str], tmp_path: Path) -> Commands:
    settings = {**environment, "VAULT_MODE": "self", "VAULT_ENCRYPTION_KEYS": KEYS}
    return Commands(settings, tmp_path)


def shown(celery: Commands, *arguments: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(celery.done("run", *arguments, "--json"))
    return value


def test_a_run_is_opened_shown_raised_renewed_and_closed(celery: Commands, books: Books) -> None:
    opened = shown(celery, "open", RUN, "--expected-total-cents", str(EXPECTED))
    assert (opened["cap_cents"], opened["free_cents"], opened["held_cents"]) == (CAP, CAP, 0)
    assert (opened["state"], opened["cap_will_hold"]) == ("open", True)
    assert "cap_cents" in celery.done("run", "show", RUN, "--currency", "usd")
    raised = shown(
        celery, "raise", RUN, "--expected-total-cents", "200000", "--reason", "more customers"
    )
    assert raised["cap_cents"] == 220_000
    shown(celery, "renew", RUN)
    assert len(books.keys()) == 2
    assert shown(celery, "close", RUN)["state"] == "closed"
    assert shown(celery, "reopen", RUN, "--reason", "late")["state"] == "open"


def test_what_a_run_command_refuses_is_one_line(celery: Commands) -> None:
    assert "no billing run" in celery.refused("run", "show", RUN)
    shown(celery, "open", RUN, "--expected-total-cents", "100")
    assert "billing_run" in celery.refused("run", "open", "", "--expected-total-cents", "200")
    line = celery.refused("run", "open", RUN, "--expected-total-cents", "200")
    assert "another expected total" in line
    assert celery.run("run", "open", RUN).returncode == 2
    assert celery.run("run", "raise", RUN, "--expected-total-cents", "9").returncode == 2
    assert "Stripe knows" in celery.refused(
        "run", "open", RUN, "--currency", "xyz", "--expected-total-cents", "1"
    )
    assert "VAULT_ENCRYPTION_KEYS" in celery.refused("run", "renew", RUN, VAULT_ENCRYPTION_KEYS="")


def test_keys_and_holds_are_listed_revoked_and_resolved(
    celery: Commands, vault: VaultProcess, stripe: Stripe, books: Books
) -> None:
    key = vault.issue()
    stripe.fault("reset", stage="after_claim")
    vault.create(key, "c1")
    listed = json.loads(celery.done("vault", "keys", "list", "--json"))
    assert [entry["billing_run"] for entry in listed] == [RUN]
    assert key not in json.dumps(listed)
    holds = json.loads(celery.done("vault", "holds", "list", "--state", "unknown", "--json"))
    assert [hold["idempotency_key"] for hold in holds] == ["c1"]
    assert celery.done("vault", "holds", "resolve", "c1", "absent") == "unknown -> released\n"
    assert "no hold" in celery.refused("vault", "holds", "resolve", "c9", "failed")
    celery.done("vault", "keys", "revoke", str(listed[0]["id"]))
    assert vault.create(key, "c2").code == "key_revoked"
    assert "no key" in celery.refused("vault", "keys", "revoke", "999")
    shown(celery, "open", "2026-10", "--expected-total-cents", "100")
    assert celery.done("vault", "keys", "reencrypt") == "encrypted 1 keys anew\n"
    assert celery.json("vault", "keys", "reencrypt") == {"reencrypted": 1}
    assert celery.json("vault", "keys", "revoke", str(listed[0]["id"]))["revoked"] is True
    again = celery.json("vault", "holds", "resolve", "c1", "failed")
    assert (again["before"], again["state"]) == ("released", "released")
