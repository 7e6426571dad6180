"""Holds that are settled or released later: by what passes through, by word, by proof."""

from __future__ import annotations

from sandbox import clock
from tests.support.stripe import Stripe
from tests.support.vault import Books, VaultProcess
from tests.support.vault_calls import create_unheard, creating_held

HOUR_S = 3600.0


def test_a_cancel_that_passes_through_releases_the_hold(
    vault: VaultProcess, stripe: Stripe, books: Books
) -> None:
    key = vault.issue()
    reply = vault.create(key, "c1", payment_method="pm_auth_1")
    intent = reply.json["error"]["payment_intent"]["id"]
    assert books.hold("c1")["state"] == "sent"
    canceled = vault.request("POST", f"/stripe/v1/payment_intents/{intent}/cancel", key=key)
    assert canceled.json["status"] == "canceled"
    assert books.hold("c1")["state"] == "released"
    assert books.budget()["held_cents"] == 0


def test_a_success_that_passes_through_a_read_settles_the_hold(
    vault: VaultProcess, stripe: Stripe, books: Books
) -> None:
    key = vault.issue()
    intent = vault.create(key, "c1", payment_method="pm_processing_1").json["id"]
    assert books.hold("c1")["state"] == "sent"
    vault.get(key, f"/v1/payment_intents/{intent}")
    assert books.hold("c1")["state"] == "sent"
    stripe.settle(intent)
    vault.get(key, f"/v1/payment_intents/{intent}")
    assert books.hold("c1")["state"] == "settled"
    books.check()


def test_a_failure_in_passing_counts_only_once_no_request_can_be_running(
    vault: VaultProcess, stripe: Stripe, books: Books, database_url: str
) -> None:
    key = vault.issue()
    intent = vault.create(key, "c1", payment_method="pm_processing_1").json["id"]
    stripe.settle(intent, "failed")
    vault.get(key, f"/v1/payment_intents/{intent}")
    assert books.hold("c1")["state"] == "sent"
    clock.advance(database_url, 60)
    vault.get(key, f"/v1/payment_intents/{intent}")
    assert books.hold("c1")["state"] == "released"


def test_resolving_settles_and_releases(vault: VaultProcess, stripe: Stripe, books: Books) -> None:
    key = vault.issue()
    for name, outcome in (("c1", "settled"), ("c2", "failed"), ("c3", "absent")):
        create_unheard(vault, stripe, key, name, stage="after_claim")
        assert vault.resolve(name, outcome).status == 200
        assert vault.resolve(name, outcome).status == 200
    states = [(h["state"], h["first_sent_at"] is None) for h in books.holds()]
    assert states == [("settled", False), ("released", False), ("released", True)]
    books.check()


def test_a_settled_hold_is_never_resolved_as_a_failure(vault: VaultProcess, books: Books) -> None:
    key = vault.issue()
    vault.create(key, "c1")
    for outcome in ("failed", "absent"):
        reply = vault.resolve("c1", outcome)
        assert (reply.status, reply.code) == (409, "hold_not_resolvable")
    assert vault.resolve("unheard-of", "settled").code == "hold_unknown"
    assert vault.resolve("c1", "perhaps").status == 400
    assert books.hold("c1")["state"] == "settled"


def test_what_was_seen_before_the_last_send_releases_nothing(
    vault: VaultProcess, stripe: Stripe, books: Books
) -> None:
    key = vault.issue()
    before = books.now()
    create_unheard(vault, stripe, key, "c1", stage="after_claim")
    for outcome in ("failed", "absent"):
        reply = vault.resolve("c1", outcome, seen_at=before.isoformat())
        assert (reply.status, reply.code) == (409, "hold_not_resolvable")
    for wrong in ("2026-09-01", "2026-09-01T00:00:00", "soon", 17):
        assert vault.resolve("c1", "absent", seen_at=wrong).status == 400
    assert books.hold("c1")["state"] != "released"
    assert vault.resolve("c1", "absent", seen_at=books.now().isoformat()).status == 200
    assert books.hold("c1")["state"] == "released"
    # Money that was seen counts, whenever that was.
    assert vault.resolve("c1", "settled", seen_at=before.isoformat()).status == 200
    books.check()


def test_a_hold_under_way_is_not_resolved_as_a_failure(
    vault: VaultProcess, stripe: Stripe, books: Books
) -> None:
    key = vault.issue()
    with creating_held(vault, stripe, key, "c1") as (first,):
        assert vault.resolve("c1", "absent").code == "hold_not_resolvable"
        stripe.release()
        assert first.result().status == 200


def test_a_late_success_on_a_released_hold_is_settled_with_an_alarm(
    vault: VaultProcess, stripe: Stripe, books: Books
) -> None:
    key = vault.issue(cap_cents=2500)
    intent = vault.create(key, "c1", payment_method="pm_processing_1").json["id"]
    assert vault.resolve("c1", "failed").status == 200
    assert vault.create(key, "c2").status == 200
    stripe.settle(intent)
    vault.get(key, f"/v1/payment_intents/{intent}")
    hold = books.hold("c1")
    assert (hold["state"], hold["late"]) == ("settled", True)
    assert books.budget()["settled_cents"] == 5000
    metrics = vault.request("GET", "/metrics").body.decode()
    assert 'vault_alarms_total{alarm="late_success"} 1.0' in metrics
    assert "vault_late_success" in vault.log.read_text()
    books.check()


def test_a_late_success_is_settled_even_beside_a_live_hold_of_the_same_charge(
    vault: VaultProcess, stripe: Stripe, books: Books
) -> None:
    key = vault.issue()
    intent = vault.create(key, "c1", payment_method="pm_processing_1").json["id"]
    vault.resolve("c1", "failed")
    vault.create(key, "c1", idempotency_key="c1-1", epoch="1", payment_method="pm_processing_2")
    stripe.settle(intent)
    vault.get(key, f"/v1/payment_intents/{intent}")
    assert [h["state"] for h in books.holds()] == ["settled", "sent"]
    books.check()


def test_a_zombie_send_twenty_five_hours_late_is_refused(
    vault: VaultProcess, stripe: Stripe, books: Books, database_url: str
) -> None:
    key = vault.issue()
    create_unheard(vault, stripe, key)
    vault.create(key, "c2", payment_method="pm_decline_expired_card")
    vault.create(key, "c3")
    clock.advance(database_url, 25 * HOUR_S)
    stripe.clock(25 * HOUR_S)
    for name in ("c1", "c2", "c3"):
        refused = vault.create(key, name)
        assert (refused.code, refused.forwarded) == ("resend_window", "no"), name
    assert len(stripe.charges()) == 2
    books.check()


def test_proof_of_absence_opens_the_window_anew(
    vault: VaultProcess, stripe: Stripe, database_url: str
) -> None:
    key = vault.issue()
    create_unheard(vault, stripe, key, stage="after_claim")
    clock.advance(database_url, 25 * HOUR_S)
    stripe.clock(25 * HOUR_S)
    assert vault.create(key, "c1").code == "resend_window"
    assert vault.resolve("c1", "absent").status == 200
    assert vault.create(key, "c1").status == 200
    assert len(stripe.charges()) == 1
