"""What the vault lets through: exactly the calls that the pipeline makes, and nothing else.

Pure: a request comes in as it was received, and goes out as a `ForwardCall` put together anew
from what was understood of it. What was not understood is refused, so that two readers of one
request cannot understand it differently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn
from urllib.parse import urlencode

from models.money import CURRENCIES
from vault.answers import Refused
from vault.forms import parse_form

PREFIX: Final = "/stripe"
"""In front of Stripe's own paths."""
MAX_BODY_BYTES: Final = 512 * 1024
"""Fifty metadata values of 500 characters, percent-encoded at their longest, fit in."""
MAX_TARGET_CHARACTERS: Final = 4096
MAX_TEXT_CHARACTERS: Final = 5000
MAX_METADATA_CHARACTERS: Final = 500
FORM: Final = "application/x-www-form-urlencoded"

SEND_BEFORE: Final = "vault-send-before"
"""From the pipeline's own workers: a request that lay about unread is not sent after this."""

REFUSED_HEADERS: Final = frozenset(
    {
        "content-encoding",
        "stripe-account",
        "stripe-context",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-http-method",
        "x-http-method-override",
        "x-method-override",
    }
)
"""They would make Stripe, or a proxy on the way, understand another request."""
SINGLE_HEADERS: Final = frozenset(
    {
        "authorization",
        "content-length",
        "content-type",
        "host",
        "idempotency-key",
        "stripe-version",
        SEND_BEFORE,
    }
)

Check = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Received:
    """A request as it came; `target` is path and query, to the character."""

    method: str
    target: str
    headers: Sequence[tuple[str, str]]
    body: bytes


@dataclass(frozen=True, slots=True)
class Money:
    """What a create would take, as its hold is kept."""

    endpoint: str
    """`payment_intents` or `charges`."""
    idempotency_key: str
    charge_key: str
    attempt_epoch: int
    billing_run: str
    currency: str
    amount_cents: int
    send_before_s: float | None
    """When the sender's right to send ends, in Unix seconds of the ledger's clock."""


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """A request as it goes out to Stripe."""

    rule: str
    """One of `models.vault_keys.ENDPOINTS`."""
    method: str
    target: str
    body: bytes | None
    idempotency_key: str | None
    stripe_version: str | None
    endpoint: str
    """The collection that the reply's objects come from."""
    money: Money | None
    """Set for creates only: nothing else takes money."""


def _matches(pattern: str) -> Check:
    compiled = re.compile(pattern, re.ASCII)
    return lambda value: compiled.fullmatch(value) is not None


def _text(value: str) -> bool:
    return len(value) <= MAX_TEXT_CHARACTERS


def _metadata(value: str) -> bool:
    return len(value) <= MAX_METADATA_CHARACTERS


_ID: Final = r"\w{1,255}"
_METHOD: Final = _matches(rf"(?:pm|card|src)_{_ID}")
_CUSTOMER: Final = _matches(rf"cus_{_ID}")
_TRUE: Final = _matches("true")
_SECONDS: Final = _matches(r"\d{1,12}")
_MOMENT: Final = _matches(r"\d{1,12}(?:\.\d{1,6})?")
_OBJECT: Final = _matches(rf"(?:pi|ch|py)_{_ID}")
_METADATA_NAME: Final = re.compile(r"metadata\[[^\[\]\x00]{1,40}\]")
_IDEMPOTENCY_KEY: Final = _matches(r"[\x21-\x7e]{1,255}")
_VERSION: Final = _matches(r"[A-Za-z0-9._-]{1,64}")
_CHARGE_KEY: Final = _matches(r"[A-Za-z0-9._:-]{1,255}")
_EPOCH: Final = _matches(r"\d{1,6}")

_CREATE: Final[Mapping[str, Check]] = {
    "amount": _matches(r"[1-9]\d{0,11}"),
    "currency": lambda value: value in CURRENCIES,
    "customer": _CUSTOMER,
    "description": _text,
    "statement_descriptor_suffix": _text,
    "metadata[charge_key]": _CHARGE_KEY,
    "metadata[attempt_epoch]": _EPOCH,
}
_REQUIRED: Final = (
    "amount",
    "currency",
    "customer",
    "metadata[charge_key]",
    "metadata[billing_run]",
)
_CREATE_INTENT: Final = {
    **_CREATE,
    "payment_method": _METHOD,
    # Anything else would leave an intent that somebody could confirm past the vault.
    "confirm": _TRUE,
    "off_session": _TRUE,
}
_CREATE_CHARGE: Final = {**_CREATE, "source": _METHOD}
_LIST: Final[Mapping[str, Check]] = {
    "customer": _CUSTOMER,
    "created[gt]": _SECONDS,
    "created[gte]": _SECONDS,
    "created[lt]": _SECONDS,
    "created[lte]": _SECONDS,
    "limit": _matches(r"[1-9]\d{0,2}"),
    "starting_after": _OBJECT,
    "ending_before": _OBJECT,
}


@dataclass(frozen=True, slots=True)
class _Rule:
    name: str
    path: re.Pattern[str]
    endpoint: str
    parameters: Mapping[str, Check]
    required: tuple[str, ...] = ()
    creates: bool = False

    @property
    def method(self) -> str:
        return self.name.partition(" ")[0]


def _rule(
    name: str,
    parameters: Mapping[str, Check] | None = None,
    *,
    ids: str = "",
    required: tuple[str, ...] = (),
    creates: bool = False,
) -> _Rule:
    path = name.partition(" ")[2]
    pattern = re.escape(path).replace(re.escape("{id}"), rf"(?:{ids})_{_ID}")
    endpoint = path.split("/")[2]
    return _Rule(name, re.compile(pattern, re.ASCII), endpoint, parameters or {}, required, creates)


RULES: Final = (
    _rule(
        "POST /v1/payment_intents",
        _CREATE_INTENT,
        required=(*_REQUIRED, "confirm", "off_session"),
        creates=True,
    ),
    _rule("POST /v1/payment_intents/{id}/cancel", ids="pi"),
    _rule("GET /v1/payment_intents", _LIST),
    _rule("GET /v1/payment_intents/{id}", ids="pi"),
    _rule("POST /v1/charges", _CREATE_CHARGE, required=_REQUIRED, creates=True),
    _rule("GET /v1/charges", {**_LIST, "payment_intent": _OBJECT}),
    _rule("GET /v1/charges/{id}", ids="ch|py"),
    _rule("GET /v1/customers/{id}", ids="cus"),
    _rule("GET /v1/account"),
)


def understand(request: Received) -> ForwardCall:
    """Return the call that a request asks for; raise Refused (`endpoint_refused`) otherwise."""
    headers = _headers(request.headers)
    path, mark, query = request.target.partition("?")
    if len(request.target) > MAX_TARGET_CHARACTERS:
        _refuse("the path is too long")
    rule = _find(request.method, path)
    if rule.method == "GET":
        if request.body:
            _refuse("a read has no body")
        given = parse_form(query) if mark else {}
    else:
        if mark:
            _refuse("a write has no query")
        given = parse_form(_body_text(request.body, headers))
    _check(rule, given)
    key = _idempotency_key(rule, headers)
    send_before_s = _send_before(headers)
    encoded = urlencode(list(given.items()))
    target = path.removeprefix(PREFIX)
    is_read = rule.method == "GET"
    return ForwardCall(
        rule=rule.name,
        method=rule.method,
        target=f"{target}?{encoded}" if is_read and encoded else target,
        body=None if is_read else encoded.encode("ascii"),
        idempotency_key=key,
        stripe_version=_version(headers),
        endpoint=rule.endpoint,
        money=_money(rule, given, key, send_before_s) if rule.creates and key else None,
    )


def refuse_by_headers(headers: Sequence[tuple[str, str]]) -> None:
    """Raise Refused for what need not be read any further."""
    found = _headers(headers)
    length = found.get("content-length", "0")
    if not _SECONDS(length) or int(length) > MAX_BODY_BYTES:
        _refuse(f"a body is at most {MAX_BODY_BYTES} bytes long")


def bearer(headers: Sequence[tuple[str, str]]) -> str | None:
    """The bearer token of a request; None without exactly one."""
    found = [value for name, value in headers if name.lower() == "authorization"]
    if len(found) != 1:
        return None
    scheme, _, token = found[0].partition(" ")
    return token if scheme.lower() == "bearer" and _IDEMPOTENCY_KEY(token) else None


def _refuse(message: str, param: str | None = None) -> NoReturn:
    raise Refused("endpoint_refused", message, param)


def _headers(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, value in pairs:
        folded = name.lower()
        if folded in REFUSED_HEADERS:
            _refuse(f"the header {folded} is not taken")
        if folded in SINGLE_HEADERS and folded in headers:
            _refuse(f"the header {folded} may stand only once")
        headers[folded] = value
    return headers


def _find(method: str, path: str) -> _Rule:
    # The path is compared as it was sent: nothing is decoded, folded or normalised.
    if path.startswith(f"{PREFIX}/"):
        bare = path[len(PREFIX) :]
        for rule in RULES:
            if rule.method == method and rule.path.fullmatch(bare):
                return rule
    _refuse("the vault forwards no such call")


def _body_text(body: bytes, headers: Mapping[str, str]) -> str:
    if not body:
        return ""
    kind, _, more = headers.get("content-type", "").partition(";")
    if kind.strip().lower() != FORM or more.strip().lower() not in ("", "charset=utf-8"):
        _refuse(f"a body must be {FORM}")
    try:
        return body.decode("ascii")
    except UnicodeDecodeError:
        _refuse("a body must be percent-encoded")


def _check(rule: _Rule, given: Mapping[str, str]) -> None:
    for name, value in given.items():
        check = rule.parameters.get(name)
        if check is None and rule.creates and _METADATA_NAME.fullmatch(name) is not None:
            check = _metadata
        if check is None:
            _refuse("the vault does not know this parameter", name[:80])
        if not check(value):
            _refuse("the vault does not pass on this value", name[:80])
    for name in rule.required:
        if not given.get(name):
            _refuse("the parameter is required", name)


def _idempotency_key(rule: _Rule, headers: Mapping[str, str]) -> str | None:
    key = headers.get("idempotency-key")
    if rule.method == "GET":
        return None
    if key is None:
        if rule.creates:
            _refuse("the header idempotency-key is required")
        return None
    if not _IDEMPOTENCY_KEY(key):
        _refuse("the header idempotency-key must be 1 to 255 visible ASCII characters")
    return key


def _version(headers: Mapping[str, str]) -> str | None:
    version = headers.get("stripe-version")
    if version is not None and not _VERSION(version):
        _refuse("the header stripe-version is not one")
    return version


def _send_before(headers: Mapping[str, str]) -> float | None:
    moment = headers.get(SEND_BEFORE)
    if moment is None:
        return None
    if not _MOMENT(moment):
        _refuse(f"the header {SEND_BEFORE} must be Unix seconds")
    return float(moment)


def _money(
    rule: _Rule, given: Mapping[str, str], idempotency_key: str, send_before_s: float | None
) -> Money:
    return Money(
        endpoint=rule.endpoint,
        idempotency_key=idempotency_key,
        charge_key=given["metadata[charge_key]"],
        attempt_epoch=int(given.get("metadata[attempt_epoch]", "0")),
        billing_run=given["metadata[billing_run]"],
        currency=given["currency"],
        amount_cents=int(given["amount"]),
        send_before_s=send_before_s,
    )
