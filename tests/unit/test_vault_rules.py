"""What the vault understands, and that it understands nothing else."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.vault_keys import ENDPOINTS
from tests.support.vault import RUN, create_fields
from vault.answers import REFUSALS, Refused
from vault.rules import (
    MAX_BODY_BYTES,
    PREFIX,
    RULES,
    ForwardCall,
    Received,
    bearer,
    refuse_by_headers,
    understand,
)

FORM = "application/x-www-form-urlencoded"
PATHS = {
    "POST": r"/v1/payment_intents(/pi_\w+/cancel)?|/v1/charges",
    "GET": (
        r"/v1/payment_intents(/pi_\w+)?|/v1/charges(/(ch|py)_\w+)?"
        r"|/v1/customers/cus_\w+|/v1/account"
    ),
}


def create(
    path: str = "/v1/payment_intents",
    *,
    body: bytes | None = None,
    headers: tuple[tuple[str, str], ...] = (),
    key: str | None = "k1",
    kind: str = FORM,
    **fields: str,
) -> Received:
    endpoint = path.rpartition("/")[2]
    sent = urlencode(create_fields("c1", endpoint, **fields)).encode() if body is None else body
    own = (("Authorization", "Bearer vk"), ("Content-Type", kind))
    keys = (("Idempotency-Key", key),) if key is not None else ()
    return Received("POST", PREFIX + path, (*own, *keys, *headers), sent)


def read(target: str, method: str = "GET", body: bytes = b"") -> Received:
    return Received(method, target, (("Authorization", "Bearer vk"),), body)


def refused(request: Received) -> Refused:
    with pytest.raises(Refused) as caught:
        understand(request)
    assert caught.value.code == "endpoint_refused"
    return caught.value


def test_a_create_is_understood_with_the_money_it_would_take() -> None:
    call = understand(create())
    assert call.money is not None
    assert call.money.amount_cents == 2500
    assert (call.money.charge_key, call.money.idempotency_key) == ("c1", "k1")
    assert (call.money.billing_run, call.money.currency) == (RUN, "usd")
    assert (call.method, call.target) == ("POST", "/v1/payment_intents")
    assert call.body is not None
    assert dict(parse_qsl(call.body.decode())) == create_fields("c1")


@pytest.mark.parametrize("path", ["/v1/payment_intents", "/v1/charges"])
def test_every_call_of_the_pipeline_passes(path: str) -> None:
    assert understand(create(path)).rule == f"POST {path}"
    listing = f"{PREFIX}{path}?customer=cus_1&created%5Bgte%5D=1&limit=100&starting_after=pi_9"
    call = understand(read(listing))
    assert call.target == f"{path}?customer=cus_1&created%5Bgte%5D=1&limit=100&starting_after=pi_9"
    assert call.money is None


def test_reads_and_cancels_pass() -> None:
    for target, rule in (
        ("/v1/account", "GET /v1/account"),
        ("/v1/customers/cus_1", "GET /v1/customers/{id}"),
        ("/v1/payment_intents/pi_1", "GET /v1/payment_intents/{id}"),
        ("/v1/charges/ch_1", "GET /v1/charges/{id}"),
        ("/v1/charges/py_1", "GET /v1/charges/{id}"),
    ):
        assert understand(read(PREFIX + target)).rule == rule
    cancel = understand(read(f"{PREFIX}/v1/payment_intents/pi_1/cancel", "POST"))
    assert (cancel.rule, cancel.body) == ("POST /v1/payment_intents/{id}/cancel", b"")


def test_there_is_a_rule_for_each_endpoint_and_no_other() -> None:
    assert tuple(rule.name for rule in RULES) == ENDPOINTS


@pytest.mark.parametrize(
    "target",
    [
        "/stripe/v1/payment_intents/",
        "/stripe/v1//payment_intents",
        "/stripe/v1/./payment_intents",
        "/stripe/v1/../v1/payment_intents",
        "/stripe/v1/payment_intents/..",
        "/stripe/v1/payment_intents/%2e%2e/refunds",
        "/stripe/v1/payment%5fintents",
        "/stripe/V1/payment_intents",
        "/stripe/v1/payment_intents;x=1",
        "/stripe/v1/payment_intents#x",
        "/stripe/v1/payment_intents/pi_1/confirm",
        "/stripe/v1/payment_intents/pi_1/capture",
        "/stripe/v1/payment_intents/pi_1%0d%0aX:%20y/cancel",
        "/stripe/v1/payment_intents/pi_1\n/cancel",
        "/stripe/v1/refunds",
        "/stripe/v1/customers",
        "/stripe/v1/payouts",
        "/stripe/v2/core/accounts",
        "http://api.stripe.com/stripe/v1/payment_intents",
        "/v1/payment_intents",
        "*",
        "",
    ],
)
@pytest.mark.parametrize("method", ["POST", "GET"])
def test_any_other_path_is_refused(target: str, method: str) -> None:
    refused(Received(method, target, create().headers, b""))


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "post", "GETS"])
def test_any_other_method_is_refused(method: str) -> None:
    refused(read(f"{PREFIX}/v1/payment_intents", method))
    refused(read(f"{PREFIX}/v1/customers/cus_1", method))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("expand[]", "customer"),
        ("expand", "customer"),
        ("capture_method", "manual"),
        ("transfer_data[destination]", "acct_1"),
        ("on_behalf_of", "acct_1"),
        ("application_fee_amount", "1"),
        ("amount[]", "1"),
        ("amount ", "1"),
        ("metadata", "x"),
        ("metadata[]", "x"),
        ("metadata[a][b]", "x"),
        ("payment_method_data[type]", "card"),
        ("return_url", "https://example.com"),
    ],
)
def test_unknown_parameters_are_refused(name: str, value: str) -> None:
    assert refused(create(**{name: value})).param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("amount", "0"),
        ("amount", "-1"),
        ("amount", "2500.0"),
        ("amount", "02500"),
        ("amount", "2 500"),
        ("amount", "٢٥٠٠"),
        ("amount", "9" * 13),
        ("currency", "USD"),
        ("currency", "xyz"),
        ("customer", "acct_1"),
        ("customer", "cus_1\n"),
        ("confirm", "false"),
        ("off_session", "one_off"),
        ("payment_method", "tok_visa"),
        ("metadata[charge_key]", "a b"),
        ("metadata[attempt_epoch]", "-1"),
    ],
)
def test_values_that_could_be_read_in_two_ways_are_refused(name: str, value: str) -> None:
    assert refused(create(**{name: value})).param == name


@pytest.mark.parametrize(
    "name",
    [
        "amount",
        "currency",
        "customer",
        "confirm",
        "off_session",
        "metadata[charge_key]",
        "metadata[billing_run]",
    ],
)
def test_what_a_hold_needs_is_required(name: str) -> None:
    assert refused(create(**{name: ""})).param == name


@pytest.mark.parametrize(
    "more",
    [
        b"&amount=1",
        b"&%61mount=1",
        b"&metadata%5Bcharge_key%5D=c2",
        b"&amount",
        b"&",
        b"&=x&=y",
        b"&x=%zz",
        b"&x=%",
        b"&description=%ff",
        b"&description=%00",
        b"&description=\xc3\xa9",
    ],
)
def test_duplicates_and_broken_encodings_are_refused(more: bytes) -> None:
    refused(create(body=urlencode(create_fields("c1")).encode() + more))


@pytest.mark.parametrize(
    "kind", ["application/json", "multipart/form-data; boundary=x", "", f"{FORM}; charset=utf-16"]
)
def test_other_content_types_are_refused(kind: str) -> None:
    refused(create(kind=kind))
    assert understand(create(kind=f"{FORM}; charset=UTF-8")).money is not None


@pytest.mark.parametrize(
    "header",
    [
        ("Stripe-Account", "acct_1"),
        ("STRIPE-ACCOUNT", "acct_1"),
        ("Stripe-Context", "acct_1"),
        ("Transfer-Encoding", "chunked"),
        ("Content-Encoding", "gzip"),
        ("X-HTTP-Method-Override", "DELETE"),
        ("Upgrade", "h2c"),
        ("Idempotency-Key", "k2"),
        ("Content-Type", FORM),
        ("Stripe-Version", "2020-01-01\r\nX: y"),
    ],
)
def test_headers_that_would_change_the_request_are_refused(header: tuple[str, str]) -> None:
    refused(create(headers=(header,)))


@pytest.mark.parametrize("key", [None, "", "a b", "k" * 256, "k\u00e9", "k\r\nX: y"])
def test_a_create_needs_one_plain_idempotency_key(key: str | None) -> None:
    refused(create(key=key))


def test_a_query_on_a_write_and_a_body_on_a_read_are_refused() -> None:
    refused(create("/v1/payment_intents?amount=1"))
    refused(read(f"{PREFIX}/v1/payment_intents/pi_1/cancel?x=1", "POST"))
    refused(read(f"{PREFIX}/v1/account", body=b"x=1"))
    refused(read(f"{PREFIX}/v1/customers/cus_1?expand%5B%5D=sources"))
    refused(read(f"{PREFIX}/v1/payment_intents?limit=0"))


def test_a_body_that_is_too_long_is_refused_before_it_is_read() -> None:
    refuse_by_headers((("Content-Length", str(MAX_BODY_BYTES)),))
    for length in (str(MAX_BODY_BYTES + 1), "1e3", "-1", "0x10", "", "9" * 30):
        with pytest.raises(Refused):
            refuse_by_headers((("Content-Length", length),))


def test_there_is_exactly_one_bearer() -> None:
    assert bearer((("Authorization", "Bearer vk_1"),)) == "vk_1"
    for headers in (
        (),
        (("Authorization", "Basic dms6"),),
        (("Authorization", "Bearer"),),
        (("Authorization", "Bearer a b"),),
        (("Authorization", "Bearer a"), ("authorization", "Bearer b")),
    ):
        assert bearer(headers) is None


def test_no_refusal_looks_like_a_declined_card_or_a_bad_request() -> None:
    assert {status for status, _ in REFUSALS.values()} <= {401, 403, 409, 503}


# -- nothing gets by -------------------------------------------------------------------------

_NAMES = st.sampled_from(
    [*create_fields("c1"), "source", "expand[]", "limit", "created[gte]", "metadata[x]", "x"]
)
_VALUES = st.one_of(
    st.sampled_from([*create_fields("c1").values(), "card_visa", "", "0", "\x00", "é", "a&b=c"]),
    st.text(max_size=20),
)
_PATHS = st.one_of(
    st.sampled_from(
        [
            name.partition(" ")[2].replace("{id}", ident)
            for name in ENDPOINTS
            for ident in ("pi_1", "ch_1", "cus_1", "..", "pi_1/capture")
        ]
    ),
    st.text(alphabet="/v1payment_intentschargescus%2e.;?#\r\n ", max_size=40),
)
_HEADERS = st.lists(
    st.tuples(
        st.sampled_from(
            ["Idempotency-Key", "Content-Type", "Stripe-Account", "Stripe-Version", "X-Other"]
        ),
        st.sampled_from(["k1", FORM, "acct_1", "2026-10-28.endive", "a\r\nb: c", ""]),
    ),
    max_size=4,
)


def understood(request: Received) -> ForwardCall | None:
    try:
        return understand(request)
    except Refused:
        return None


@given(
    method=st.sampled_from(["POST", "GET", "DELETE", "PUT"]),
    path=_PATHS,
    headers=st.one_of(
        _HEADERS, _HEADERS.map(lambda more: [("Idempotency-Key", "k1"), ("Content-Type", FORM)])
    ),
    pairs=st.lists(st.tuples(_NAMES, _VALUES), max_size=12),
    base=st.booleans(),
    query=st.booleans(),
)
def test_whatever_comes_in_only_allowed_calls_go_out(
    method: str,
    path: str,
    headers: list[tuple[str, str]],
    pairs: list[tuple[str, str]],
    base: bool,
    query: bool,
) -> None:
    sent = [*create_fields("c1").items(), *pairs] if base else pairs
    form = urlencode(sent, errors="surrogatepass")
    target = PREFIX + path + (f"?{form}" if query else "")
    call = understood(Received(method, target, headers, b"" if query else form.encode()))
    if call is None:
        return
    out, _, out_query = call.target.partition("?")
    assert re.fullmatch(PATHS[call.method], out, re.ASCII)
    assert not re.search(r"[^\x21-\x7e]", call.target)
    assert call.method == method
    names = [name for name, _ in parse_qsl(out_query or (call.body or b"").decode(), True)]
    assert len(names) == len(set(names))
    assert not any(name.startswith(("expand", "transfer", "on_behalf")) for name in names)
    if method == "POST" and not out.endswith("/cancel"):
        given_out = dict(parse_qsl((call.body or b"").decode(), keep_blank_values=True))
        assert call.money is not None
        assert str(call.money.amount_cents) == given_out["amount"]
        assert call.money.currency == given_out["currency"]
        assert call.money.charge_key == given_out["metadata[charge_key]"]
        assert call.money.billing_run == given_out["metadata[billing_run]"] != ""
        assert call.money.idempotency_key == call.idempotency_key == "k1"
    else:
        assert call.money is None


@given(st.binary(max_size=200), st.sampled_from(["/v1/payment_intents", "/v1/charges"]))
def test_bytes_that_are_no_form_never_become_a_create(body: bytes, path: str) -> None:
    call = understood(create(path, body=body))
    assert call is None
