"""Arbitrary bytes against a running vault: nothing reaches Stripe but what may, nor unheld."""

from __future__ import annotations

import re
import socket
from urllib.parse import urlencode

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.vault_keys import ENDPOINTS
from tests.support.stripe import Stripe
from tests.support.vault import Books, VaultProcess, create_fields

REACHABLE = re.compile(
    r"POST /v1/(payment_intents|charges|payment_intents/pi_\w+/cancel)"
    r"|GET /v1/(payment_intents|charges|account|payment_intents/pi_\w+|charges/(ch|py)_\w+"
    r"|customers/cus_\w+)",
    re.ASCII,
)
CREATES = ("/v1/payment_intents", "/v1/charges")
EXAMPLES = 300
INTERIM = b"HTTP/1.1 100 (Continue)\r\n\r\n"

_TARGETS = st.one_of(
    st.sampled_from(
        [
            prefix + name.partition(" ")[2].replace("{id}", found) + query
            for name in ENDPOINTS
            for prefix in ("/stripe", "/stripe/", "", "http://x/stripe", "/stripe/.", "/vault/..")
            for found in ("pi_1", "ch_1", "cus_1", "..%2f..")
            for query in ("", "?limit=1", "?expand[]=x", "?", "%00")
        ]
    ),
    st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=126), max_size=60),
)
_NAMES = [*create_fields("c"), "source", "expand[]", "capture_method", "metadata[x]", "limit"]
_PAIRS = st.lists(
    st.tuples(st.sampled_from(_NAMES), st.sampled_from(["1", "usd", "true", "cus_1", "é", ""])),
    max_size=4,
)
_EXTRA = st.lists(
    st.sampled_from(
        [
            "Stripe-Account: acct_1",
            "Transfer-Encoding: chunked",
            "Idempotency-Key: other",
            "Content-Encoding: gzip",
            "Content-Length: 3",
            "Expect: 100-continue",
            "Connection: close",
            "X-HTTP-Method-Override: POST",
            "Content-Type: application/json",
            " folded",
            "bad header",
            "A: \x01",
        ]
    ),
    max_size=2,
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, list[str], bytes]:
    """Request line, extra headers, body; often nearly a create, sometimes one."""
    if draw(st.integers(0, 3)):
        endpoint = draw(st.sampled_from(["payment_intents", "charges"]))
        number = draw(st.integers(0, 20))
        fields = [*create_fields(f"c{number}", endpoint).items(), *draw(_PAIRS)]
        removed = draw(st.sampled_from([None, None, *create_fields("c", endpoint)]))
        body = urlencode([pair for pair in fields if pair[0] != removed]).encode()
        return f"POST /stripe/v1/{endpoint} HTTP/1.1", draw(_EXTRA), body
    method = draw(st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "get", "PATCH"]))
    version = draw(st.sampled_from(["HTTP/1.1", "HTTP/1.0", "HTTP/2.0", ""]))
    line = f"{method} {draw(_TARGETS)} {version}"
    return line, draw(_EXTRA), draw(st.binary(max_size=40))


def test_no_bytes_reach_stripe_but_allowed_calls_with_a_hold(
    vault: VaultProcess, stripe: Stripe, books: Books
) -> None:
    key = vault.issue(cap_cents=25_000)
    host, _, port = vault.env["VAULT_LISTEN"].rpartition(":")
    answers: list[bytes] = []

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    @given(requests())
    def send(request: tuple[str, list[str], bytes]) -> None:
        line, extra, body = request
        number = re.search(rb"charge_key%5D=c(\d+)", body)
        own = [
            "Host: vault",
            f"Authorization: Bearer {key}",
            "Content-Type: application/x-www-form-urlencoded",
            f"Idempotency-Key: k{number[1].decode() if number else ''}",
            f"Content-Length: {len(body)}",
        ]
        head = "\r\n".join([line, *own, *extra]) + "\r\n\r\n"
        with socket.create_connection((host, int(port)), timeout=60) as link:
            link.sendall(head.encode("latin-1") + body)
            link.shutdown(socket.SHUT_WR)
            answer = b""
            while part := link.recv(65536):
                answer += part
        # To a client that has hung up, the final answer may never be written.
        answers.append(answer.removeprefix(INTERIM))

    send()
    reached = stripe.requests()
    wrong = [r for r in reached if not REACHABLE.fullmatch(f"{r['method']} {r['path']}")]
    assert wrong == []
    held = {hold["idempotency_key"]: hold["charge_key"] for hold in books.holds()}
    for request in reached:
        if request["method"] == "POST" and request["path"] in CREATES:
            assert held[request["idempotency_key"]] == request["charge_key"]
    assert all("expand" not in request["query"] for request in reached)
    assert any(request["path"] in CREATES for request in reached)
    marked = [a for a in answers if a and b"vault-forwarded: " not in a.lower()]
    assert marked == []
    assert books.budget()["settled_cents"] <= 25_000
    assert vault.request("GET", "/readyz").status == 200
    books.check()
