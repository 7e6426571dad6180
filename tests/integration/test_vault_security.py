"""The vault from outside: raw bytes, wrong keys, other calls, and what must never be shown."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import urllib3
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from models.deployment import pin_deployment
from models.ledger import Ledger
from tests.support.stripe import Stripe
from tests.support.vault import (
    ADMIN_KEY,
    Books,
    VaultProcess,
    VaultStarter,
    create_fields,
    refused_start,
)
from vault.limiter import FAILURES

UPSTREAM_KEY = "sk_test_upstream"
HALF_REQUEST_S = 30
"""A request that the vault still waits for more of is ended after this: none of these is one."""


def raw(vault: VaultProcess, request: bytes, replies: int = 1) -> bytes:
    """Everything that comes back to these bytes until the vault closes, or is done.

    Our side stays open until the replies have begun: a client that hangs up gets none.
    """
    host, _, port = vault.env["VAULT_LISTEN"].rpartition(":")
    came = b""
    with socket.create_connection((host, int(port)), timeout=HALF_REQUEST_S) as link:
        link.sendall(request)
        with contextlib.suppress(TimeoutError):
            while came.count(b"HTTP/1.1 ") < replies and (part := link.recv(65536)):
                came += part
        link.settimeout(HALF_REQUEST_S)
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_WR)
        while part := link.recv(65536):
            came += part
    return came


def post(
    key: str, *headers: str, body: str = "", path: str = "/stripe/v1/payment_intents"
) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: vault",
        f"Authorization: Bearer {key}",
        "Content-Type: application/x-www-form-urlencoded",
        "Idempotency-Key: c1",
        *headers,
    ]
    return ("\r\n".join(lines) + "\r\n\r\n" + body).encode("latin-1")


BODY = "&".join(f"{name}={value}" for name, value in create_fields("c1").items())


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (["Transfer-Encoding: chunked"], f"{len(BODY):x}\r\n{BODY}\r\n0\r\n\r\n"),
        (["Transfer-Encoding: chunked", f"Content-Length: {len(BODY)}"], BODY),
        (["Transfer-Encoding: xchunked"], BODY),
        ([f"Content-Length: {len(BODY)}", "Content-Length: 5"], BODY),
        ([f"Content-Length: {len(BODY)}", f"Content-Length: {len(BODY)}"], BODY),
        ([f"Content-Length: +{len(BODY)}"], BODY),
        (["Content-Length: 99999999"], BODY),
        (["Content-Length: -1"], BODY),
        ([f"Content-Length: {len(BODY)}", "Stripe-Account: acct_1"], BODY),
        ([f"Content-Length: {len(BODY)}", "Idempotency-Key: c2"], BODY),
        ([f"Content-Length: {len(BODY)}", "Authorization: Bearer other"], BODY),
        ([f"Content-Length: {len(BODY)}", *["Vault-Send-Before: 9999999999"] * 2], BODY),
        ([f"Content-Length: {len(BODY)}", "Expect: 100-continue", "Content-Encoding: gzip"], BODY),
        ([f"Content-Length: {len(BODY)}", "No colon here"], BODY),
        ([f"Content-Length: {len(BODY)}", " folded: yes"], BODY),
        ([f"Content-Length: {len(BODY)}", "X: a\x00b"], BODY),
    ],
)
def test_smuggled_requests_never_reach_stripe_and_say_so(
    vault: VaultProcess, stripe: Stripe, books: Books, headers: list[str], body: str
) -> None:
    reply = raw(vault, post(vault.issue(), *headers, body=body))
    assert reply.startswith(b"HTTP/1.1 ")
    assert int(reply.split(b" ")[1]) >= 400
    assert b"vault-forwarded: no\r\n" in reply.lower()
    assert stripe.requests() == []
    assert books.holds() == []


@pytest.mark.parametrize(
    "request_line",
    [
        "POST http://api.stripe.com/stripe/v1/payment_intents HTTP/1.1",
        "POST /stripe/v1/../v1/payment_intents HTTP/1.1",
        "POST /stripe/v1/payment_intents%00 HTTP/1.1",
        "POST /stripe/v1/refunds HTTP/1.1",
        "DELETE /stripe/v1/customers/cus_1 HTTP/1.1",
        "GET /stripe/v1/payment_intents/pi_1?expand[]=customer HTTP/1.1",
        "CONNECT api.stripe.com:443 HTTP/1.1",
        "TRACE /stripe/v1/account HTTP/1.1",
        "POST /stripe/v1/payment_intents HTTP/9.9",
        "nonsense",
    ],
)
def test_other_calls_never_reach_stripe(
    vault: VaultProcess, stripe: Stripe, request_line: str
) -> None:
    rest = post(vault.issue(), "Content-Length: 0").split(b"\r\n", 1)[1]
    reply = raw(vault, request_line.encode() + b"\r\n" + rest)
    assert b"vault-forwarded: no\r\n" in reply.lower()
    assert stripe.requests() == []


def test_two_requests_on_one_connection_are_two_requests(
    vault: VaultProcess, stripe: Stripe
) -> None:
    """What follows a body is the next request, whatever the first one was."""
    key = vault.issue()
    hidden = post(key, "Content-Length: 0", path="/stripe/v1/refunds").decode()
    reply = raw(vault, post(key, f"Content-Length: {len(BODY)}", body=BODY + hidden), replies=2)
    assert reply.count(b"HTTP/1.1 ") == 2
    assert {r["path"] for r in stripe.requests()} == {"/v1/payment_intents"}


def test_a_client_that_waits_for_leave_to_send_its_body_gets_a_marked_answer(
    vault: VaultProcess, stripe: Stripe
) -> None:
    request = post(vault.issue(), f"Content-Length: {len(BODY)}", "Expect: 100-continue", body=BODY)
    interim, _, final = raw(vault, request, replies=2).partition(b"\r\n\r\n")
    assert interim == b"HTTP/1.1 100 (Continue)"
    assert final.startswith(b"HTTP/1.1 200 ")
    assert b"Vault-Forwarded: yes" in final
    assert len(stripe.charges()) == 1


def test_the_version_and_the_idempotency_key_pass_unchanged(
    vault: VaultProcess, stripe: Stripe
) -> None:
    reply = vault.create(vault.issue(), "c1", headers={"Stripe-Version": "2026-10-28.endive"})
    assert reply.headers["Stripe-Version"] == "2026-10-28.endive"
    assert stripe.requests()[0]["idempotency_key"] == "c1"


def test_the_admin_bearer_and_vault_keys_are_apart(vault: VaultProcess, stripe: Stripe) -> None:
    key = vault.issue()
    for wrong in (None, "", "x", key, UPSTREAM_KEY, ADMIN_KEY + "x"):
        reply = vault.admin("/vault/keys", {"label": "x", "cap_cents": 1}, wrong)
        assert (reply.status, reply.forwarded) == (401, "no")
    assert vault.create(ADMIN_KEY, "c1").status in (401, 429)
    assert stripe.requests() == []


def test_wrong_keys_are_limited_and_right_ones_pass(vault: VaultProcess, stripe: Stripe) -> None:
    key = vault.issue()
    assert vault.create(key, "c1").status == 200
    codes = [vault.create(f"vk_guess_{n}", "c2").status for n in range(FAILURES + 2)]
    assert codes == [401] * FAILURES + [429] * 2
    assert vault.create(key, "c2").status == 200
    assert vault.admin("/vault/keys", {"label": "x", "cap_cents": 1}).status == 429
    assert len(stripe.charges()) == 2


def test_a_key_may_be_good_for_some_calls_only(vault: VaultProcess, stripe: Stripe) -> None:
    key = vault.issue(allowed_endpoints=["POST /v1/charges", "/v1/payment_intents/{id}"])
    assert vault.create(key, "c1", endpoint="charges").status == 200
    assert vault.create(key, "c2").code == "endpoint_refused"
    assert vault.get(key, "/v1/payment_intents/pi_1").status == 404
    assert vault.get(key, "/v1/account").code == "endpoint_refused"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"label": ""},
        {"label": "x"},
        {"label": "x", "cap_cents": -1},
        {"label": "x", "cap_cents": "5"},
        {"label": "x", "cap_cents": 1, "currency": "xyz"},
        {"label": "x", "cap_cents": 1, "vendor": "other"},
        {"label": "x", "cap_cents": 1, "expires_at": "tomorrow"},
        {"label": "x", "cap_cents": 1, "expires_at": "2026-01-01T00:00:00"},
        {"label": "x", "cap_cents": 1, "expires_at": "2999-01-01T00:00:00+00:00"},
        {"label": "x", "cap_cents": 1, "allowed_endpoints": ["POST /v1/refunds"]},
        {"label": "x", "cap_cents": 1, "surprise": 1},
        {"label": "x", "daily_usd_cap": 5, "currency": "eur"},
        [],
    ],
)
def test_a_key_that_was_not_asked_for_clearly_is_not_issued(
    vault: VaultProcess, books: Books, body: Any
) -> None:
    reply = vault.request("POST", "/vault/keys", key=ADMIN_KEY, body=json.dumps(body).encode())
    assert (reply.status, reply.forwarded) == (400, "no")
    assert books.keys() == []


def test_the_hosted_contract_alone_makes_a_key_with_a_cap(
    vault: VaultProcess, books: Books
) -> None:
    reply = vault.admin(
        "/vault/keys",
        {
            "vendor": "stripe",
            "label": "2026-09",
            "daily_usd_cap": 25,
            "allowed_endpoints": ["POST /v1/payment_intents"],
            "expires_at": (datetime.now(UTC) + timedelta(hours=1)).isoformat(),
        },
    )
    key = reply.json["vault_key"]
    assert books.budget()["cap_cents"] == 2500
    assert vault.create(key, "c1").status == 200
    assert vault.create(key, "c2").code == "over_cap"


def test_another_key_for_a_budget_is_no_new_money(vault: VaultProcess, stripe: Stripe) -> None:
    vault.create(vault.issue(cap_cents=2500), "c1")
    again = vault.issue(cap_cents=None)
    assert vault.create(again, "c2").code == "over_cap"
    more = vault.admin(
        "/vault/keys", {"label": "x", "billing_run": "2026-09", "cap_cents": 1_000_000}
    )
    assert (more.status, more.code) == (409, "cap_differs")
    assert len(stripe.charges()) == 1


def test_a_revoked_key_takes_no_new_holds(vault: VaultProcess) -> None:
    body = {"label": "x", "billing_run": "2026-09", "cap_cents": 10_000}
    issued = vault.admin("/vault/keys", body).json
    assert vault.admin(f"/vault/keys/{issued['id']}/revoke", {}).status == 200
    assert vault.create(issued["vault_key"], "c1").code == "key_revoked"
    assert vault.admin("/vault/keys/999/revoke", {}).status == 404


def test_no_secret_is_kept_logged_or_shown(
    vault_starter: VaultStarter, stripe: Stripe, books: Books
) -> None:
    vault = vault_starter(STRIPE_API_KEY="sk_test_bad_marker")
    key = vault.issue()
    reply = vault.create(key, "c1", customer="cus_marker")
    assert (reply.status, reply.code, reply.forwarded) == (401, "upstream_key_refused", "yes")
    assert books.hold("c1")["state"] == "released"
    seen = "".join(
        [
            vault.log.read_text(),
            vault.request("GET", "/metrics").body.decode(),
            reply.body.decode(),
            str(reply.headers),
            books.everything(),
        ]
    )
    for secret in ("sk_test_bad_marker", key, ADMIN_KEY, "cus_marker"):
        assert secret not in seen


def test_probes_and_metrics(vault: VaultProcess) -> None:
    assert vault.request("GET", "/healthz").json == {"status": "ok"}
    assert vault.request("GET", "/readyz").json == {"ready": True}
    key = vault.issue()
    vault.create(key, "c1")
    vault.create(key, "c2", amount="900000000")
    page = vault.request("GET", "/metrics").body.decode()
    assert 'vault_refusals_total{code="over_cap"} 1.0' in page
    assert 'call="POST /v1/payment_intents",forwarded="yes",status="200"} 1.0' in page
    assert 'vault_holds_total{state="settled"} 1.0' in page
    for path in ("/", "/metrics/x", "/vault", "/_sim/reset"):
        reply = vault.request("GET", path)
        assert (reply.status, reply.forwarded) == (404, "no")


def test_it_serves_tls(vault_starter: VaultStarter, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    vault = vault_starter(wait=False, VAULT_TLS_CERT=str(cert), VAULT_TLS_KEY=str(key))
    vault.url = vault.url.replace("http:", "https:")
    vault.http = urllib3.PoolManager(
        ssl_context=ssl.create_default_context(cafile=str(cert)), retries=False, timeout=60
    )
    vault.start()
    assert vault.create(vault.issue(), "c1").status == 200


def test_what_keeps_it_from_starting_is_one_line(vault: VaultProcess) -> None:
    for change, said in (
        ({"VAULT_LISTEN": "0.0.0.0:0"}, "VAULT_LISTEN"),
        ({"VAULT_ADMIN_KEY": ""}, "VAULT_ADMIN_KEY is not set"),
        ({"DATABASE_URL": "postgresql://127.0.0.1:9/none"}, "DATABASE_URL"),
        ({"VAULT_LISTEN": vault.env["VAULT_LISTEN"]}, "cannot listen"),
    ):
        assert said in refused_start({**vault.env, **change})


def test_a_key_of_another_mode_than_the_first_does_not_start(
    vault_starter: VaultStarter, ledger: Ledger
) -> None:
    pin_deployment(ledger.engine, "stripe-billing")
    vault = vault_starter(STRIPE_API_KEY="sk_test_1")
    live = {**vault.env, "STRIPE_API_KEY": "sk_live_1"}
    assert "STRIPE_API_KEY (live or test mode) is not the one" in refused_start(live)
    vault.stop()
    vault_starter(STRIPE_API_KEY="rk_test_2")


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "vault")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    paths = folder / "cert.pem", folder / "key.pem"
    paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths
