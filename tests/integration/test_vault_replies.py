"""What a worker believes of a vault's replies, and the hosted vault; the vault is a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from cryptography.fernet import Fernet
from sqlalchemy.engine import Engine

from models.billing_runs import BillingRuns
from models.ledger import boot_clock_s
from models.run_keys import RunKeys
from models.states import State
from tasks.errors import StripeUnavailable
from tests.support.flows import Worker
from tests.support.stripe import Stripe
from tests.support.vault import ADMIN_KEY, RUN, Books
from tests.unit.scripted_server import Answer, ScriptedServer, reply, serving

KEYS = Fernet.generate_key().decode()
INTENT = {"id": "pi_1", "object": "payment_intent", "status": "succeeded", "latest_charge": "ch_1"}
FORWARDED = {"Vault_Forwarded": "yes"}
CARD = "pm_card_visa"
EXPECTED = 100_000

StartWorker = Callable[..., Worker]


def refusal(status: int, code: str, **headers: str) -> Answer:
    return reply(status, {"error": {"type": "vault_error", "code": code}}, **headers)


def bearers(server: ScriptedServer) -> list[str]:
    return [dict(server.headers(request))["authorization"] for request in server.requests]


@pytest.fixture
def runs(engine: Engine) -> BillingRuns:
    return BillingRuns(engine, "test")


@pytest.fixture
def worker_at(environment: dict[str, str], stripe: Stripe) -> Iterator[StartWorker]:
    made: list[Worker] = []

    def start(server: ScriptedServer, mode: str = "self") -> Worker:
        settings = {
            "VAULT_MODE": mode,
            "VAULT_URL": server.url,
            "VAULT_ADMIN_KEY": ADMIN_KEY,
            "VAULT_ENCRYPTION_KEYS": KEYS,
            "STRIPE_API_KEY": "",
        }
        made.append(Worker(environment, stripe, **settings))
        return made[-1]

    yield start
    for worker in made:
        worker.close()


@contextmanager
def vaulted(
    worker_at: StartWorker, mode: str, *answers: Answer
) -> Iterator[tuple[Worker, ScriptedServer]]:
    with serving(*answers) as server:
        yield worker_at(server, mode), server


def charge(worker: Worker, customer: str = "cus_1", **fields: str) -> str:
    return worker.charge(customer, billing_run=RUN, payment_method=CARD, **fields)


# -- self-hosted -------------------------------------------------------------------------


def test_a_reply_without_the_vaults_word_proves_nothing(
    worker_at: StartWorker, runs: BillingRuns
) -> None:
    runs.open(RUN, "usd", EXPECTED)
    not_found = {"error": {"type": "invalid_request_error", "code": "resource_missing"}}
    with vaulted(worker_at, "self", reply(200, INTENT), reply(404, not_found)) as (worker, _):
        assert charge(worker) == State.SENT
        with pytest.raises(StripeUnavailable, match="resource_missing"):
            worker.here.gateway.customer("cus_1", boot_clock_s() + 30)
    with vaulted(worker_at, "self", reply(404, not_found, **FORWARDED)) as (worker, _):
        worker.here.gateway.ready(RUN, "usd")
        assert not worker.here.gateway.customer("cus_1", boot_clock_s() + 30).exists


@pytest.mark.parametrize("code", ["key_expired", "key_unknown", "key_revoked"])
def test_a_refused_key_is_read_again_and_the_charge_goes_out_once_with_the_new_one(
    worker_at: StartWorker, runs: BillingRuns, code: str
) -> None:
    runs.open(RUN, "usd", EXPECTED)
    refused = refusal(401 if code == "key_unknown" else 403, code, Vault_Forwarded="no")
    with vaulted(worker_at, "self", refused, reply(200, INTENT, **FORWARDED)) as (worker, server):
        worker.here.gateway.ready(RUN, "usd")
        renewed = RunKeys(runs, KEYS).renew(RUN, "usd").vault_key
        assert charge(worker) == State.CHARGED
        assert len(server.requests) == 2
        assert bearers(server)[1] == f"Bearer {renewed}" != bearers(server)[0]


def test_a_refusal_of_the_key_that_is_still_the_runs_own_is_believed(
    worker_at: StartWorker, runs: BillingRuns
) -> None:
    runs.open(RUN, "usd", EXPECTED)
    answers = [
        refusal(401, "key_unknown", Vault_Forwarded="no"),
        refusal(403, "key_revoked", Vault_Forwarded="no"),
    ]
    with vaulted(worker_at, "self", *answers) as (worker, server):
        assert charge(worker, "cus_1") == State.RESERVED
        assert charge(worker, "cus_2") == State.BLOCKED
        assert len(server.requests) == 2


# -- hosted ------------------------------------------------------------------------------


def test_a_hosted_vault_is_asked_for_one_key_a_run_and_needs_no_header(
    worker_at: StartWorker, runs: BillingRuns, books: Books
) -> None:
    runs.open(RUN, "usd", EXPECTED)
    issued = reply(200, {"vault_key": "hosted-key"})
    with vaulted(worker_at, "hosted", issued, reply(200, INTENT)) as (worker, server):
        assert charge(worker, "cus_1") == State.CHARGED
        assert charge(worker, "cus_2") == State.CHARGED
        assert bearers(server) == [f"Bearer {ADMIN_KEY}", *["Bearer hosted-key"] * 2]
        assert b'"daily_usd_cap": 1100' in server.requests[0]
    assert "hosted-key" not in books.everything()


def test_with_a_hosted_vault_the_worker_sees_to_closing_itself(
    worker_at: StartWorker, runs: BillingRuns, books: Books
) -> None:
    runs.open(RUN, "usd", EXPECTED)
    with vaulted(worker_at, "hosted", reply(200, {"vault_key": "hosted-key"})) as (worker, server):
        books.set_run_state("closing")
        assert charge(worker, "cus_1") == "reserved:run_closing"
        books.set_run_state("closed")
        # What was read of a run is believed for a few seconds only.
        late = worker_at(server, "hosted")
        assert charge(late, "cus_2") == State.BLOCKED
        assert late.record("cus_2").error_code == "run_closed"
        assert len(server.requests) == 1
        runs.open(RUN, "eur", EXPECTED)
        assert charge(worker, "cus_3", currency="eur") == "reserved:currency_not_capped"
