"""Requests that the vault finds too late: their sender's right to send is over."""

from __future__ import annotations

import signal
from collections.abc import Callable

import psutil
import pytest
from sqlalchemy import text
from sqlalchemy.engine import Engine

from models.database import rows
from models.keys import charge_key
from models.states import State
from tests.support.flows import PERIOD, Worker
from tests.support.stripe import Stripe
from tests.support.vault import Books, VaultProcess
from tests.support.vaulted_workers import charge, later
from tests.support.waiting import wait_until

HEADER = "Vault-Send-Before"
REFUSED = b'vault_refusals_total{code="busy"} 1.0'
Moment = Callable[[float], str]


@pytest.fixture
def moment(engine: Engine) -> Moment:
    """A header's value: so many seconds from now on the ledger's clock."""

    def at(seconds: float) -> str:
        (row,) = rows(engine, text("SELECT EXTRACT(EPOCH FROM ledger_now())::float8 AS now"), {})
        return f"{row['now'] + seconds:.6f}"

    return at


def test_a_request_whose_senders_time_is_over_is_not_sent(
    vault: VaultProcess, stripe: Stripe, books: Books, moment: Moment
) -> None:
    key = vault.issue()
    late = vault.create(key, "c1", headers={HEADER: moment(-0.001)})
    assert (late.status, late.code, late.forwarded) == (503, "busy", "no")
    assert stripe.requests() == []
    assert books.holds() == []
    assert books.budget()["held_cents"] == 0
    assert vault.create(key, "c1", headers={HEADER: moment(60)}).status == 200
    assert vault.create(key, "c1", headers={HEADER: moment(-1)}).forwarded == "no", "a replay"
    assert len(stripe.requests()) == 1


def test_a_released_hold_is_not_taken_again_too_late(
    vault: VaultProcess, stripe: Stripe, books: Books, moment: Moment
) -> None:
    key = vault.issue()
    declined = {"payment_method": "pm_card_chargeDeclined"}
    assert vault.create(key, "c1", **declined).status == 402
    late = vault.create(key, "c1", headers={HEADER: moment(-1)}, **declined)
    assert (late.status, late.forwarded) == (503, "no")
    assert books.hold("c1")["state"] == "released"
    assert books.budget()["held_cents"] == 0


@pytest.mark.parametrize("value", ["soon", "-1", "1e9", "1.2.3", "", "nan", "9" * 13])
def test_a_moment_that_is_none_is_refused(vault: VaultProcess, stripe: Stripe, value: str) -> None:
    reply = vault.create(vault.issue(), "c1", headers={HEADER: value})
    assert (reply.status, reply.code, reply.forwarded) == (403, "endpoint_refused", "no")
    assert stripe.requests() == []


def test_a_vault_that_thaws_after_the_lease_sends_nothing_of_what_it_had_not_read(
    vaulted_worker: Worker, stripe: Stripe, vault: VaultProcess, books: Books
) -> None:
    worker = vaulted_worker
    assert charge(worker, "cus_first") == State.CHARGED
    vault.signal(signal.SIGSTOP)
    stopped = psutil.STATUS_STOPPED
    wait_until(lambda: psutil.Process(vault.pid).status() == stopped, 30, "it is frozen")
    assert charge(worker, "cus_late", payment_method="pm_card_visa") == State.SENT
    worker.pass_time(60)
    vault.signal(signal.SIGCONT)
    wait_until(lambda: REFUSED in vault.request("GET", "/metrics").body, 30, "it was refused")
    assert worker.charges("cus_late") == []
    assert books.holds() == [books.hold(charge_key("cus_first", PERIOD))]
    assert later(worker, "cus_late", 60) == State.CHARGED
    assert len(worker.charges("cus_late")) == 1
