"""Vaults that die, freeze, stop or lose their database in the middle of a charge."""

from __future__ import annotations

import http.client
import signal
import threading
from urllib.parse import urlencode

import pytest
import urllib3

from sandbox import clock
from tests.support.faults import FaultPoints
from tests.support.services import Services
from tests.support.stripe import Stripe
from tests.support.vault import RUN, Books, VaultProcess, VaultStarter, create_fields
from tests.support.vault_calls import HELD_S, creating, creating_held
from tests.support.waiting import wait_until

AMOUNT = 2500
TOO_LATE_S = 10.5
"""Sleeps longer than a vault may take from a request to its sending."""


def create_unanswered(
    vault: VaultProcess, key: str, *, payment_method: str = "pm_card_visa"
) -> None:
    """A create of "c1" whose connection breaks."""
    with pytest.raises(urllib3.exceptions.HTTPError):
        vault.create(key, "c1", payment_method=payment_method)


@pytest.mark.parametrize(
    ("point", "state", "held", "taken"),
    [
        ("vault.before_hold", None, 0, 0),
        ("vault.after_hold", "reserved", AMOUNT, 0),
        ("vault.before_send", "sent", AMOUNT, 0),
        ("vault.after_answer", "sent", AMOUNT, 1),
        ("vault.after_outcome", "settled", 0, 1),
    ],
)
def test_a_vault_that_is_killed_loses_no_hold_and_charges_nothing_twice(
    vault: VaultProcess,
    stripe: Stripe,
    books: Books,
    fault_point: FaultPoints,
    point: str,
    state: str | None,
    held: int,
    taken: int,
) -> None:
    key = vault.issue(cap_cents=AMOUNT)
    fault_point(point, "kill")
    create_unanswered(vault, key)
    wait_until(lambda: not vault.is_alive(), 30, "the vault is dead")
    assert [h["state"] for h in books.holds()] == ([state] if state else [])
    assert books.budget()["held_cents"] == held
    assert len(stripe.charges()) == taken
    vault.restart()
    if state:
        assert vault.create(key, "c2").code == "over_cap"
    assert vault.create(key, "c1").json["status"] == "succeeded"
    assert books.budget() == {"cap_cents": AMOUNT, "settled_cents": AMOUNT, "held_cents": 0}
    assert len(stripe.charges()) == 1
    books.check()


def test_a_forward_that_died_with_its_vault_holds_up_no_release_for_ever(
    vault: VaultProcess,
    stripe: Stripe,
    books: Books,
    fault_point: FaultPoints,
    database_url: str,
) -> None:
    key = vault.issue()
    fault_point("vault.before_send", "kill")
    create_unanswered(vault, key)
    vault.restart()
    assert vault.resolve("c1", "absent").code == "hold_not_resolvable"
    clock.advance(database_url, 60)
    assert vault.resolve("c1", "absent").status == 200
    assert books.hold("c1")["state"] == "released"
    assert vault.create(key, "c1").status == 200
    assert len(stripe.charges()) == 1


def test_a_forward_that_died_long_ago_does_not_keep_a_declined_charge_held(
    vault: VaultProcess,
    stripe: Stripe,
    books: Books,
    fault_point: FaultPoints,
    database_url: str,
) -> None:
    key = vault.issue()
    method = "pm_decline_expired_card"
    fault_point("vault.before_send", "kill")
    create_unanswered(vault, key, payment_method=method)
    vault.restart()
    clock.advance(database_url, 20)
    stripe.fault("reset", stage="after_commit", idempotency_key="c1")
    vault.create(key, "c1", payment_method=method)
    clock.advance(database_url, 20)
    assert vault.create(key, "c1", payment_method=method).status == 402
    assert books.hold("c1")["state"] == "released"
    assert books.budget()["held_cents"] == 0


def test_a_frozen_vault_holds_up_no_other(
    vault_starter: VaultStarter, stripe: Stripe, books: Books, fault_point: FaultPoints
) -> None:
    frozen, other = vault_starter(), vault_starter()
    key = frozen.issue()
    for point in ("vault.after_hold", "vault.before_send", "vault.after_answer"):
        charge_key = point.removeprefix("vault.")
        fault_point(point, "freeze")
        with creating(frozen, key, charge_key) as stuck:
            fault_point.wait_reached(point)
            assert other.create(key, f"other-{charge_key}").status == 200
            assert other.create(key, charge_key).json["status"] == "succeeded"
            frozen.signal(signal.SIGCONT)
            assert stuck.result().status == 200
    assert len(stripe.charges()) == 6
    books.check()


def test_a_vault_that_slept_before_its_commit_does_not_send_what_was_given_up_meanwhile(
    vault: VaultProcess, stripe: Stripe, books: Books, fault_point: FaultPoints
) -> None:
    key = vault.issue()
    fault_point("vault.after_hold", "hold")
    with creating(vault, key) as late:
        fault_point.wait_reached("vault.after_hold")
        assert vault.resolve("c1", "absent").status == 200
        threading.Event().wait(TOO_LATE_S)
        fault_point.release("vault.after_hold")
        reply = late.result()
    assert (reply.status, reply.code, reply.forwarded) == (503, "busy", "no")
    assert stripe.requests() == []
    assert books.hold("c1")["state"] == "released"
    assert vault.create(key, "c1").status == 200


def test_a_vault_that_slept_after_its_commit_does_not_send(
    vault: VaultProcess, stripe: Stripe, books: Books, fault_point: FaultPoints
) -> None:
    key = vault.issue()
    fault_point("vault.before_send", "hold")
    with creating(vault, key) as late:
        fault_point.wait_reached("vault.before_send")
        threading.Event().wait(TOO_LATE_S)
        fault_point.release("vault.before_send")
        reply = late.result()
    assert (reply.status, reply.code, reply.forwarded) == (503, "busy", "no")
    assert stripe.requests() == []
    assert books.hold("c1")["state"] == "released"
    assert books.hold("c1")["first_sent_at"] is None
    assert vault.create(key, "c1").status == 200


def test_the_clients_leaving_does_not_stop_what_is_under_way(
    vault: VaultProcess, stripe: Stripe, books: Books
) -> None:
    key = vault.issue()
    stripe.fault("latency", stage="after_claim", seconds=HELD_S, idempotency_key="c1")
    client = http.client.HTTPConnection(vault.env["VAULT_LISTEN"], timeout=HELD_S)
    sent = {
        "Authorization": f"Bearer {key}",
        "Content-Type": "application/x-www-form-urlencoded",
        "Idempotency-Key": "c1",
    }
    client.request("POST", "/stripe/v1/payment_intents", urlencode(create_fields("c1")), sent)
    wait_until(stripe.creates, 30, "Stripe has the request")
    client.close()
    # Answered by the loop that has seen the end of the connection by then.
    assert vault.request("GET", "/healthz").status == 200
    assert books.hold("c1")["state"] == "sent"
    stripe.release()
    wait_until(lambda: books.hold("c1")["state"] == "settled", 30, "the outcome is written")
    assert len(stripe.charges()) == 1


def test_a_vault_told_to_stop_ends_what_is_under_way(
    vault: VaultProcess, stripe: Stripe, books: Books
) -> None:
    key = vault.issue()
    with creating_held(vault, stripe, key, "c1") as (reply,):
        vault.ask_to_stop()
        wait_until(lambda: "vault_stopping" in vault.log.read_text(), 30, "it has been told")
        stripe.release()
        assert reply.result().json["status"] == "succeeded"
    wait_until(lambda: not vault.is_alive(), 30, "the vault has ended")
    assert books.hold("c1")["state"] == "settled"
    assert "vault_stopped" in vault.log.read_text()


def test_without_its_database_the_vault_sends_nothing(
    vault: VaultProcess, stripe: Stripe, services: Services
) -> None:
    key = vault.issue()
    services.kill("postgres")
    refused = vault.create(key, "c1")
    assert (refused.status, refused.code, refused.forwarded) == (503, "busy", "no")
    assert vault.request("GET", "/readyz").status == 503
    assert stripe.creates() == []
    services.heal()
    assert vault.create(key, "c1").status == 200


def test_an_outcome_is_committed_before_the_client_hears_it(
    vault: VaultProcess,
    stripe: Stripe,
    books: Books,
    services: Services,
    fault_point: FaultPoints,
) -> None:
    key = vault.issue()
    fault_point("vault.after_answer", "hold")
    with creating(vault, key) as reply:
        fault_point.wait_reached("vault.after_answer")
        services.kill("postgres")
        fault_point("vault.not_committed", "hold")
        fault_point.release("vault.after_answer")
        fault_point.wait_reached("vault.not_committed")
        services.heal()
        assert not reply.done()
        fault_point.release("vault.not_committed")
        assert reply.result().json["status"] == "succeeded"
    assert books.hold("c1")["state"] == "settled"
    assert books.budget(RUN)["held_cents"] == 0
