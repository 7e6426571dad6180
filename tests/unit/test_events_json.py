"""The JSON reader's strictness, and properties that hold for any body at all."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.errors import DeadLetterReason, EventRefused
from models.events import BillingEvent, decode_event, event_from_json, stripe_metadata
from models.strict_json import (
    MAX_BODY_BYTES,
    MAX_DEPTH_LEVELS,
    NOT_AN_INTEGER,
    parse_strict_json,
)

if TYPE_CHECKING:
    import random

PLAIN = (
    b'{"customer_id": "cust_1", "billing_period": "2026-Q3", "amount_cents": 2500, '
    b'"stripe_customer_id": "cus_T1", "extra": EXTRA}'
)


def with_extra(extra: bytes) -> bytes:
    return PLAIN.replace(b"EXTRA", extra)


def reason_of(body: bytes) -> str | None:
    try:
        decode_event(body)
    except EventRefused as refused:
        return refused.reason
    return None


def nested(levels: int) -> bytes:
    """An ignored field that makes the whole body this many levels deep."""
    inner = levels - 1
    return with_extra(b"[" * inner + b"]" * inner)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"\xff\xfe{}",
        b"\xef\xbb\xbf{}",
        b'"\xed\xa0\x80"',
        b'{"a": "\xc0\xaf"}',
        "{}".encode("utf-16"),
        b"{}{}",
        b"{} x",
        b"{'a': 1}",
        b'{"a": 1,}',
        b"[1,]",
        b'{"a"}',
        b'{"a": 01}',
        b'{"a": +1}',
        b'{"a": .5}',
        b'{"a": 1.}',
        b'{"a": 0x10}',
        b'{"a": "\n"}',
        b'{"a": "\x00"}',
        b'{"a": "\\x41"}',
        b'{"a": "\\ud80"}',
        b'{"a": nan}',
        b"// x\n{}",
        b"\x0b{}",
        b"{}\xc2\xa0",
        b"\x00{}",
    ],
)
def test_what_is_not_strict_json_is_refused(body: bytes) -> None:
    assert reason_of(body) == DeadLetterReason.INVALID_JSON


@pytest.mark.parametrize("literal", [b"NaN", b"Infinity", b"-Infinity", b'[{"a": NaN}]'])
def test_nan_and_infinity_are_refused_anywhere(literal: bytes) -> None:
    assert reason_of(with_extra(literal)) == DeadLetterReason.INVALID_JSON


@pytest.mark.parametrize(
    "extra",
    [
        b'{"a": 1, "a": 1}',
        b'[{"a": [{"b": 1, "c": 2, "b": 3}]}]',
        b'{"a": 1, "\\u0061": 2}',
        b'null, "extra": null',
        b'null, "cust\\u006fmer_id": "cust_2"',
    ],
)
def test_a_name_twice_is_refused_anywhere(extra: bytes) -> None:
    assert reason_of(with_extra(extra)) == DeadLetterReason.INVALID_JSON


def test_names_that_only_look_alike_are_two_names() -> None:
    assert reason_of(with_extra('{"é": 1, "e\u0301": 2}'.encode())) is None


@pytest.mark.parametrize(
    "extra",
    [b"1e999", b"-1e-999", b"1." + b"3" * 9000, b"9" * 9000, b"-" + b"9" * 200_000, b'"\\ud800"'],
    ids=["inf", "tiny", "fraction", "digits", "many digits", "lone surrogate"],
)
def test_odd_values_in_an_ignored_field_are_tolerated(extra: bytes) -> None:
    assert reason_of(with_extra(extra)) is None


def test_only_integers_of_a_sane_size_are_numbers() -> None:
    assert parse_strict_json(b"[0, -7, 18446744073709551616]") == [0, -7, 2**64]
    for literal in (b"1.0", b"1e2", b"9" * 21):
        assert parse_strict_json(literal) is NOT_AN_INTEGER


def test_the_deepest_body_has_64_levels() -> None:
    assert MAX_DEPTH_LEVELS == 64
    assert reason_of(nested(64)) is None
    assert reason_of(nested(65)) == DeadLetterReason.INVALID_JSON
    assert reason_of(nested(100_000)) == DeadLetterReason.INVALID_JSON


def test_objects_count_as_levels_too() -> None:
    assert reason_of(with_extra(b'{"a":' * 63 + b"1" + b"}" * 63)) is None
    assert reason_of(with_extra(b'{"a":' * 64 + b"1" + b"}" * 64)) == DeadLetterReason.INVALID_JSON


def test_brackets_side_by_side_are_not_deep() -> None:
    assert reason_of(with_extra(b"[" + b"[{}]," * 5000 + b"[]]")) is None


@pytest.mark.parametrize(
    "text", [b"[" * 500, b'\\"' + b"[" * 500, b"\\\\\\\\", b"\\\\\\" + b'"' + b"{" * 200]
)
def test_brackets_inside_a_string_are_not_levels(text: bytes) -> None:
    assert reason_of(with_extra(b'["' + text + b'"]')) is None


def test_a_string_cannot_hide_levels() -> None:
    deep = b"[" * 70 + b"]" * 70
    assert reason_of(with_extra(b'["\\\\", ' + deep + b"]")) == DeadLetterReason.INVALID_JSON


def test_the_longest_body_has_256_kib() -> None:
    room = MAX_BODY_BYTES - len(with_extra(b'""'))
    assert reason_of(with_extra(b'"' + b"x" * room + b'"')) is None
    assert reason_of(with_extra(b'"' + b"x" * (room + 1) + b'"')) == DeadLetterReason.TOO_LARGE


@pytest.mark.parametrize(
    "body",
    [
        b"[" * MAX_BODY_BYTES,
        b"[]" * (MAX_BODY_BYTES // 2),
        b"[" * 70 + b'"' + b'\\"' * 130_000,
        b"[" * 70 + b"\\" * 260_000,
        b"[" * 70 + b'"' * 260_000,
        b'{"a":' * 50_000,
        b"{" * 70 + b'"' + b"\xff" * 260_000,
    ],
    ids=["open", "pairs", "escaped quotes", "backslashes", "quotes", "objects", "not UTF-8"],
)
def test_hostile_bodies_are_refused_in_linear_time(body: bytes) -> None:
    # A reader that scans again from every quote would need minutes: the test would time out.
    assert reason_of(body) == DeadLetterReason.INVALID_JSON


# Properties


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
field_names = st.sampled_from(
    [
        "customer_id",
        "billing_period",
        "amount_cents",
        "stripe_customer_id",
        "currency",
        "payment_method",
        "billing_run",
        "description",
        "metadata",
        "event_id",
    ]
)
ids = (
    st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=255)
    .map(str.strip)
    .filter(bool)
)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=1100)
good_events = st.fixed_dictionaries(
    {
        "customer_id": ids,
        "billing_period": ids,
        "amount_cents": st.integers(1, 999_999).map(lambda units: units * 100),
        "stripe_customer_id": st.from_regex(r"cus_[A-Za-z0-9_]{1,20}", fullmatch=True),
    },
    optional={
        "currency": st.sampled_from(["usd", "EUR", "jpy", "KWD", "isk"]),
        "payment_method": st.from_regex(r"(pm|card|src)_[A-Za-z0-9]{1,20}", fullmatch=True),
        "billing_run": ids,
        "description": texts,
        "metadata": st.dictionaries(texts.map(lambda text: text[:60]), texts, max_size=5),
        "event_id": texts,
        "unknown": json_values,
    },
)


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_decoded_or_refused(body: bytes) -> None:
    reason_of(body)


@given(json_values | st.dictionaries(field_names, json_values))
@settings(max_examples=300, deadline=None)
def test_any_json_is_decoded_or_refused(value: Any) -> None:
    reason_of(json.dumps(value).encode())
    try:
        event_from_json(value)
    except EventRefused:
        return


@given(good_events, field_names, json_values)
@settings(max_examples=300, deadline=None)
def test_one_odd_field_is_decoded_or_refused(fields: dict[str, Any], name: str, value: Any) -> None:
    reason = reason_of(json.dumps({**fields, name: value}).encode())
    assert reason in (None, DeadLetterReason.INVALID_EVENT)


@given(good_events)
@settings(max_examples=200, deadline=None)
def test_a_stored_event_comes_back_unchanged(fields: dict[str, Any]) -> None:
    event = decode_event(json.dumps(fields).encode())
    assert event_from_json(json.loads(json.dumps(event.to_json()))) == event


@given(good_events, st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_the_order_and_spacing_of_a_body_do_not_matter(
    fields: dict[str, Any], order: random.Random
) -> None:
    names = list(fields)
    order.shuffle(names)
    shuffled: dict[str, Any] = {name: fields[name] for name in names}
    event = decode_event(json.dumps(fields).encode())
    again = decode_event(json.dumps(shuffled, indent=3, ensure_ascii=False).encode())
    assert again == event
    assert list(again.metadata.items()) == list(event.metadata.items())


def within_stripes_limits(event: BillingEvent) -> bool:
    sent = stripe_metadata(event, "0" * 32, 0)
    return (
        len(sent) <= 50
        and all(0 < len(name) <= 40 and not set(name) & set("[]") for name in sent)
        and all(0 < len(text) <= 500 for text in sent.values())
        and 0 < len(event.description.strip()) <= len(event.description) <= 1000
    )


@given(good_events)
@settings(max_examples=200, deadline=None)
def test_what_goes_to_stripe_is_within_its_limits(fields: dict[str, Any]) -> None:
    assert within_stripes_limits(decode_event(json.dumps(fields).encode()))
