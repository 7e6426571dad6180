"""Holds of a real vault in front of the simulator: taken once, settled or released by evidence."""

from __future__ import annotations

import pytest

from sandbox.ports import free_port
from tests.support.stripe import Stripe
from tests.support.vault import RUN, Books, VaultProcess, VaultStarter
from tests.support.vault_calls import create_unheard, creating_held


def test_a_charge_is_held_forwarded_and_settled(
    vault: VaultProcess, stripe: Stripe, books: Books
) -> None:
    key = vault.issue(cap_cents=10_000)
    reply = vault.create(key, "c1")
    assert (reply.status, reply.forwarded) == (200, "yes")
    assert reply.json["status"] == "succeeded"
    assert books.budget() == {"cap_cents": 10_000, "settled_cents": 2500, "held_cents": 0}
    hold = books.hold("c1")
    assert (hold["state"], hold["outcome"]) == ("settled", "charged")
    assert hold["payment_intent_id"] == reply.json["id"]
    assert [c["metadata"]["charge_key"] for c in stripe.charges()] == ["c1"]


def test_the_charges_api_passes_by_the_same_rules(
    vault: VaultProcess, stripe: Stripe, books: Books
) -> None:
    key = vault.issue(cap_cents=2500)
    assert vault.create(key, "c1", endpoint="charges").json["status"] == "succeeded"
    assert vault.create(key, "c2", endpoint="charges").code == "over_cap"
    assert books.hold("c1")["charge_id"].startswith("ch_")
    assert len(stripe.charges()) == 1


def test_a_replay_takes_no_second_hold_and_brings_the_first_answer(
    vault: VaultProcess, stripe: Stripe, books: Books
) -> None:
    key = vault.issue(cap_cents=2500)
    first = vault.create(key, "c1")
    again = vault.create(key, "c1")
    assert again.json["id"] == first.json["id"]
    assert again.headers["Idempotent-Replayed"] == "true"
    assert books.budget()["settled_cents"] == 2500
    assert len(books.holds()) == len(stripe.charges()) == 1


def test_a_declined_card_gives_the_money_back(
    vault: VaultProcess, stripe: Stripe, books: Books
) -> None:
    key = vault.issue(cap_cents=2500)
    reply = vault.create(key, "c1", payment_method="pm_decline_insufficient_funds")
    assert (reply.status, reply.json["error"]["decline_code"]) == (402, "insufficient_funds")
    assert books.hold("c1")["state"] == "released"
    assert books.budget()["held_cents"] == 0
    assert vault.create(key, "c2").status == 200


def test_a_replay_of_a_released_hold_takes_it_again_in_the_same_row(
    vault: VaultProcess, stripe: Stripe, books: Books
) -> None:
    key = vault.issue(cap_cents=2500)
    stripe.fault("http_429", idempotency_key="c1")
    assert vault.create(key, "c1").status == 429
    assert books.hold("c1")["state"] == "released"
    assert books.hold("c1")["first_sent_at"] is None
    assert vault.create(key, "c1").status == 200
    assert [h["state"] for h in books.holds()] == ["settled"]
    assert len(stripe.charges()) == 1


def test_a_released_hold_that_no_longer_fits_under_the_cap_is_refused(
    vault: VaultProcess, stripe: Stripe, books: Books
) -> None:
    key = vault.issue(cap_cents=2500)
    stripe.fault("http_429", idempotency_key="c1")
    vault.create(key, "c1")
    assert vault.create(key, "c2").status == 200
    refused = vault.create(key, "c1")
    assert (refused.code, refused.forwarded) == ("over_cap", "no")
    assert len(stripe.charges()) == 1


def test_an_unknown_keeps_holding_and_a_later_answer_settles_it(
    vault: VaultProcess, stripe: Stripe, books: Books
) -> None:
    key = vault.issue(cap_cents=2500)
    reply = create_unheard(vault, stripe, key)
    assert (reply.status, reply.code, reply.forwarded) == (504, "upstream_unknown", "yes")
    assert books.hold("c1")["state"] == "unknown"
    assert books.budget()["held_cents"] == 2500
    assert vault.create(key, "c2").code == "over_cap"
    assert vault.create(key, "c1").json["status"] == "succeeded"
    assert books.budget() == {"cap_cents": 2500, "settled_cents": 2500, "held_cents": 0}
    assert len(stripe.charges()) == 1


@pytest.mark.parametrize("kind", ["timeout", "truncate", "http_500", "html_502", "lock_timeout"])
def test_what_is_no_answer_is_never_taken_for_a_failure(
    vault_starter: VaultStarter, stripe: Stripe, books: Books, kind: str
) -> None:
    vault = vault_starter(**({"VAULT_UPSTREAM_S": "2"} if kind == "timeout" else {}))
    key = vault.issue()
    # With a connection that stands already, no time can be over before anything was sent.
    vault.create(key, "first")
    stage = "after_commit" if kind != "lock_timeout" else "before"
    stripe.fault(kind, stage=stage, idempotency_key="c1")
    vault.create(key, "c1")
    expected = "released" if kind == "lock_timeout" else "unknown"
    assert books.hold("c1")["state"] == expected
    books.check()


def test_after_an_unknown_a_refusal_that_is_no_replay_releases_nothing(
    vault: VaultProcess, stripe: Stripe, books: Books
) -> None:
    key = vault.issue()
    create_unheard(vault, stripe, key)
    stripe.fault("http_429", idempotency_key="c1")
    assert vault.create(key, "c1").status == 429
    assert books.hold("c1")["state"] == "unknown"
    assert books.hold("c1")["first_sent_at"] is not None


def test_a_failure_releases_only_when_no_other_forward_is_open(
    vault: VaultProcess, stripe: Stripe, books: Books
) -> None:
    """The first forward hangs at Stripe; the second one is told that it was not executed."""
    key = vault.issue()
    with creating_held(vault, stripe, key, "c1") as (first,):
        stripe.fault("http_429", idempotency_key="c1")
        assert vault.create(key, "c1").status == 429
        assert books.hold("c1")["state"] == "unknown"
        assert books.budget()["held_cents"] == 2500
        stripe.release()
        assert first.result().status == 200
    assert books.hold("c1")["state"] == "settled"


def test_one_charge_key_has_one_live_hold(
    vault: VaultProcess, stripe: Stripe, books: Books
) -> None:
    key = vault.issue()
    stripe.fault("reset", stage="after_claim", idempotency_key="first")
    vault.create(key, "c1", idempotency_key="first")
    refused = vault.create(key, "c1", idempotency_key="second", epoch="1")
    assert (refused.code, refused.forwarded) == ("other_hold_live", "no")
    assert len(stripe.creates()) == 1


def test_a_recharge_gets_a_hold_of_its_own_once_the_first_is_released(
    vault: VaultProcess, stripe: Stripe, books: Books
) -> None:
    key = vault.issue(cap_cents=2500)
    vault.create(key, "c1", payment_method="pm_decline_expired_card")
    assert vault.create(key, "c1", idempotency_key="c1-1", epoch="1").status == 200
    assert [h["state"] for h in books.holds()] == ["released", "settled"]
    assert vault.create(key, "c1", idempotency_key="c1-2", epoch="2").code == "other_hold_live"


def test_the_idempotency_key_of_another_request_is_refused(
    vault: VaultProcess, stripe: Stripe
) -> None:
    key = vault.issue()
    vault.create(key, "c1")
    assert vault.create(key, "c1", amount="2600").code == "endpoint_refused"
    assert vault.create(key, "c1", epoch="1").code == "endpoint_refused"
    assert vault.create(key, "c2", idempotency_key="c1").code == "endpoint_refused"
    assert len(stripe.creates()) == 1


@pytest.mark.parametrize(
    ("method", "status", "outcome"),
    [("pm_processing_1", 200, "processing"), ("pm_auth_1", 402, "requires_action")],
)
def test_an_intent_that_is_still_open_keeps_its_hold(
    vault: VaultProcess, books: Books, method: str, status: int, outcome: str
) -> None:
    key = vault.issue()
    assert vault.create(key, "c1", payment_method=method).status == status
    hold = books.hold("c1")
    assert (hold["state"], hold["outcome"]) == ("sent", outcome)
    assert books.budget()["held_cents"] == 2500


def test_a_replay_under_another_stripe_key_is_refused(
    vault: VaultProcess, vault_starter: VaultStarter, stripe: Stripe
) -> None:
    key = vault.issue()
    vault.create(key, "c1")
    other = vault_starter(STRIPE_API_KEY="sk_test_another")
    refused = other.create(key, "c1")
    assert (refused.code, refused.forwarded) == ("upstream_key_changed", "no")
    assert other.create(key, "c2").status == 200


def test_stripe_out_of_reach_is_certain_and_gives_the_money_back(
    vault_starter: VaultStarter, books: Books
) -> None:
    vault = vault_starter(STRIPE_API_BASE=f"http://127.0.0.1:{free_port()}")
    key = vault.issue()
    reply = vault.create(key, "c1")
    assert (reply.status, reply.code, reply.forwarded) == (503, "upstream_unreachable", "no")
    hold = books.hold("c1")
    assert (hold["state"], hold["first_sent_at"]) == ("released", None)


def test_runs_and_currencies_have_budgets_of_their_own(
    vault: VaultProcess, stripe: Stripe, books: Books
) -> None:
    dollars = vault.issue(cap_cents=2500)
    euros = vault.issue(cap_cents=2500, currency="eur")
    october = vault.issue(run="2026-10", cap_cents=2500)
    assert vault.create(dollars, "c1").status == 200
    assert vault.create(euros, "c2", currency="eur").status == 200
    assert vault.create(october, "c3", run="2026-10").status == 200
    assert vault.create(dollars, "c4").code == "over_cap"
    assert books.budget(RUN, "eur")["settled_cents"] == 2500


def test_a_key_is_good_for_its_own_budget_only(vault: VaultProcess, stripe: Stripe) -> None:
    key = vault.issue()
    vault.issue(run="2026-10")
    vault.issue(currency="eur")
    assert vault.create(key, "c1", run="2026-10").code == "endpoint_refused"
    assert vault.create(key, "c1", currency="eur").code == "endpoint_refused"
    assert vault.create(key, "c1", run="2026-11").code == "no_billing_run"
    assert vault.create(key, "c1", currency="gbp").code == "no_billing_run"
    assert vault.create("vk_unheard_of", "c1").code == "key_unknown"
    assert stripe.requests() == []


def test_expiry_revocation_and_closing_stop_new_holds_only(
    vault: VaultProcess, stripe: Stripe, books: Books
) -> None:
    key = vault.issue()
    create_unheard(vault, stripe, key)
    stripe.fault("http_429", idempotency_key="c2")
    vault.create(key, "c2")
    books.expire_keys()
    assert vault.create(key, "c3").code == "key_expired"
    books.set_run_state("closing")
    assert vault.create(key, "c3").code == "run_closing"
    books.set_run_state("closed")
    assert vault.create(key, "c3").code == "run_closed"
    books.revoke_keys()
    assert vault.create(key, "c3").code == "key_revoked"
    assert vault.create(key, "c1").json["status"] == "succeeded"
    assert vault.create(key, "c2").json["status"] == "succeeded"
    intent = books.hold("c1")["payment_intent_id"]
    assert vault.get(key, f"/v1/payment_intents/{intent}").status == 200
    assert vault.get(key, "/v1/customers/cus_good").status == 200
    books.check()
