"""The vault's parts without its server: verdicts, limits on guessing, what passes by, answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from models.errors import ConfigurationError
from models.outcomes import OutcomeKind
from models.settings import load_settings
from tests.unit.scripted_server import raw, reply, serving
from vault.account import READ_ACCOUNT
from vault.answers import Answer, Refused
from vault.forwarder import seen_object
from vault.limiter import FAILURES, MAX_ADDRESSES, WINDOW_S, FailureLimiter, KnownKeys
from vault.rules import ForwardCall
from vault.service import check_settings, is_loopback, tls_context
from vault.upstream import Broken, Upstream
from vault.verdicts import Verdict, judge, verdict_of


def test_only_a_known_end_moves_money() -> None:
    assert {kind for kind in OutcomeKind if verdict_of(kind) is Verdict.SETTLED} == {
        OutcomeKind.CHARGED
    }
    assert {kind for kind in OutcomeKind if verdict_of(kind) is Verdict.FAILED} == {
        OutcomeKind.CARD_DECLINED,
        OutcomeKind.REJECTED,
        OutcomeKind.NOT_EXECUTED,
    }


def row(**values: Any) -> dict[str, Any]:
    usual = {
        "permitted": True,
        "run_matches": True,
        "run_exists": True,
        "too_late": False,
        "taken_id": None,
        "hold_id": None,
        "hold_state": None,
        "same_request": None,
        "in_window": None,
        "same_upstream": None,
        "revoked": False,
        "expired": False,
        "run_state": "open",
        "has_rival": False,
        "free_cents": 10_000,
    }
    return usual | values


@pytest.mark.parametrize(
    ("found", "code"),
    [
        ({"permitted": None}, "key_unknown"),
        ({"permitted": False}, "endpoint_refused"),
        ({"run_matches": False}, "endpoint_refused"),
        ({"run_matches": False, "run_exists": False}, "no_billing_run"),
        ({"too_late": True, "revoked": True, "free_cents": 0}, "busy"),
        ({"too_late": True, "hold_id": 1, "same_request": True, "in_window": False}, "busy"),
        ({"revoked": True, "run_state": "closed"}, "key_revoked"),
        ({"run_state": "closed", "expired": True}, "run_closed"),
        ({"run_state": "closing"}, "run_closing"),
        ({"expired": True, "free_cents": 0}, "key_expired"),
        ({"has_rival": True, "free_cents": 0}, "other_hold_live"),
        ({"free_cents": 2499}, "over_cap"),
        ({"hold_id": 1, "same_request": False}, "endpoint_refused"),
        ({"hold_id": 1, "same_request": True, "in_window": False}, "resend_window"),
        (
            {"hold_id": 1, "same_request": True, "in_window": True, "same_upstream": False},
            "upstream_key_changed",
        ),
    ],
)
def test_a_hold_that_was_not_taken_has_a_named_reason(found: dict[str, Any], code: str) -> None:
    with pytest.raises(Refused) as caught:
        judge(row(**found), 2500)
    assert caught.value.code == code


def test_what_nothing_explains_is_tried_again_and_never_blocked() -> None:
    """Somebody changed the budget in between: saying `over_cap` would settle the charge."""
    assert judge(row(), 2500) is None
    released = {"hold_id": 1, "same_request": True, "in_window": True, "same_upstream": True}
    assert judge(row(**released, hold_state="released"), 2500) is None
    assert judge(row(**released, hold_state="unknown", free_cents=0), 2500) == 1
    assert judge(row(taken_id=7), 2500) == 7


def test_an_address_that_is_wrong_too_often_waits() -> None:
    now_s = 1000.0
    limiter = FailureLimiter(lambda: now_s)
    for _ in range(FAILURES):
        assert limiter.may_try("a")
        limiter.failed("a")
    assert not limiter.may_try("a")
    assert limiter.may_try("b")
    now_s += WINDOW_S
    assert limiter.may_try("a")
    limiter.failed("a")
    assert limiter.may_try("a")


def test_what_is_remembered_of_guessers_is_bounded() -> None:
    limiter, known = FailureLimiter(), KnownKeys()
    for number in range(MAX_ADDRESSES + 10):
        limiter.failed(str(number))
        known.add(str(number))
    assert limiter.may_try("0")
    assert "0" not in known
    assert str(MAX_ADDRESSES + 9) in known


def intent(status: str, **more: Any) -> dict[str, Any]:
    metadata = {"charge_key": "c1", "attempt_epoch": "2"}
    return {
        "id": "pi_1",
        "object": "payment_intent",
        "status": status,
        "metadata": metadata,
        "latest_charge": "ch_1",
        **more,
    }


def passing(value: object, rule: str = "GET /v1/payment_intents/{id}", target: str = "") -> Any:
    method, _, path = rule.partition(" ")
    endpoint = path.split("/")[2]
    call = ForwardCall(rule, method, target or path, None, None, None, endpoint, None)
    return seen_object(call, Answer(200, json.dumps(value).encode(), forwarded=True))


def test_the_end_of_a_passing_object_is_seen() -> None:
    seen = passing(intent("succeeded"))
    assert (seen.charge_key, seen.attempt_epoch, seen.verdict) == ("c1", 2, Verdict.SETTLED)
    assert (seen.payment_intent_id, seen.charge_id) == ("pi_1", "ch_1")
    assert passing(intent("canceled")).verdict is Verdict.CANCELED
    error = {"error": {"code": "x", "payment_intent": intent("succeeded")}}
    assert passing(error, "POST /v1/payment_intents/{id}/cancel").verdict is Verdict.SETTLED
    charge = {**intent("failed"), "object": "charge", "id": "ch_1"}
    assert passing(charge, "GET /v1/charges/{id}").verdict is Verdict.FAILED


@pytest.mark.parametrize(
    "value",
    [
        intent("processing"),
        intent("requires_action"),
        intent("requires_capture"),
        intent("something_new"),
        intent("succeeded", metadata={}),
        intent("succeeded", metadata=None),
        intent("succeeded", object="charge"),
        [],
        None,
        "x",
    ],
)
def test_what_shows_no_end_leaves_its_hold_alone(value: object) -> None:
    assert passing(value) is None


def test_lists_and_the_failed_charge_of_an_intent_show_nothing() -> None:
    assert passing({"object": "list", "data": []}, "GET /v1/payment_intents") is None
    failed = {**intent("failed"), "object": "charge", "payment_intent": "pi_1"}
    assert passing(failed, "GET /v1/charges/{id}") is None


GOOD = {
    "DATABASE_URL": "postgresql://localhost/x",
    "STRIPE_API_KEY": "sk_live_1",
    "VAULT_ADMIN_KEY": "a-long-enough-admin-key",
}


def test_the_vault_listens_beyond_loopback_only_with_tls_or_an_explicit_word() -> None:
    check_settings(load_settings(GOOD))
    for listen in ("0.0.0.0:1", "10.0.0.1:1", "[::]:1", "vault.example.com:1"):
        with pytest.raises(ConfigurationError, match="VAULT_LISTEN"):
            check_settings(load_settings({**GOOD, "VAULT_LISTEN": listen}))
        check_settings(load_settings({**GOOD, "VAULT_LISTEN": listen, "VAULT_ALLOW_PLAIN": "yes"}))
    tls = {**GOOD, "VAULT_LISTEN": "0.0.0.0:1", "VAULT_TLS_CERT": "c", "VAULT_TLS_KEY": "k"}
    check_settings(load_settings(tls))
    with pytest.raises(ConfigurationError, match="VAULT_TLS_CERT"):
        tls_context(load_settings(tls))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"VAULT_ADMIN_KEY": ""}, "VAULT_ADMIN_KEY"),
        ({"VAULT_ADMIN_KEY": "short"}, "VAULT_ADMIN_KEY"),
        (
            {"VAULT_ADMIN_KEY": "sk_live_1_and_longer", "STRIPE_API_KEY": "sk_live_1_and_longer"},
            "VAULT_ADMIN_KEY",
        ),
        ({"STRIPE_API_KEY": ""}, "STRIPE_API_KEY"),
        ({"STRIPE_API_BASE": "http://api.stripe.com"}, "STRIPE_API_BASE"),
    ],
)
def test_an_unsafe_vault_does_not_start(change: dict[str, str], name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        check_settings(load_settings({**GOOD, **change}))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("VAULT_LISTEN", "8410"),
        ("VAULT_LISTEN", "host:port"),
        ("VAULT_LISTEN", "127.0.0.1:70000"),
        ("VAULT_TLS_CERT", "alone.pem"),
        ("VAULT_CONCURRENCY", "0"),
        ("VAULT_ENCRYPTION_KEYS", "not a key"),
        ("RUN_AUTO_OPEN_EXPECTED_CENTS", "-1"),
    ],
)
def test_settings_of_the_vault_are_checked(setting: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=setting) as caught:
        load_settings({setting: value})
    assert "not a key" not in str(caught.value)


def test_loopback_is_what_only_this_machine_is() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "localhost.example.com", "")))


def test_an_interim_reply_is_no_answer_and_its_final_one_is_not_the_next_calls() -> None:
    interim = raw(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n")
    with serving(interim, reply(200, {"id": "pi_2"})) as server:
        upstream = Upstream(server.url, "sk_test_1", 30)
        with pytest.raises(Broken):
            upstream.exchange(READ_ACCOUNT, lambda: None)
        assert json.loads(upstream.exchange(READ_ACCOUNT, lambda: None).body) == {"id": "pi_2"}
        assert server.connections == 2
        upstream.close()


def test_a_folded_header_goes_on_to_the_client_in_one_line() -> None:
    folded = b"HTTP/1.1 200 OK\r\nRequest-Id: req\r\n 1\x0b2\r\nContent-Length: 2\r\n\r\n{}"
    with serving(raw(folded)) as server:
        upstream = Upstream(server.url, "sk_test_1", 30)
        assert upstream.exchange(READ_ACCOUNT, lambda: None).headers == {"Request-Id": "req 1 2"}
        upstream.close()


def test_the_account_key_is_known_by_a_digest_and_taken_out_of_what_stripe_says() -> None:
    upstream = Upstream("https://api.stripe.com", "sk_live_secret", 1)
    other = Upstream("https://api.stripe.com", "sk_live_other", 1)
    assert upstream.key_id != other.key_id
    assert "secret" not in upstream.key_id
    assert upstream.redact(b'{"m":"Bad key sk_live_secret."}') == b'{"m":"Bad key [key]."}'
    with pytest.raises(ConfigurationError):
        Upstream("ftp://x", "k", 1)
