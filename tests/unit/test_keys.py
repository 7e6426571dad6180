"""Charge keys, idempotency keys and fingerprints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.errors import ConfigurationError
from models.keys import (
    DEFAULT_NAMESPACE,
    charge_key,
    check_namespace,
    fingerprint,
    idempotency_key,
)

CASES = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "cases" / "keys.jsonl").read_text("utf-8").splitlines()
]
IDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)


def name_of(case: dict[str, str]) -> str:
    return f"{case['customer_id']} {case['billing_period']}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_keys_are_the_agreed_ones(case: dict[str, str]) -> None:
    identity = (case["customer_id"], case["billing_period"])
    assert charge_key(*identity, case["namespace"]) == case["epoch_0"]
    assert idempotency_key(*identity, 0, case["namespace"]) == case["epoch_0"]
    assert idempotency_key(*identity, 1, case["namespace"]) == case["epoch_1"]


def test_the_cases_use_the_default_namespace() -> None:
    assert {case["namespace"] for case in CASES} == {DEFAULT_NAMESPACE}


@given(IDS, IDS, IDS, IDS)
@settings(deadline=None)
def test_two_identities_share_a_key_only_if_they_are_the_same(
    customer: str, period: str, other_customer: str, other_period: str
) -> None:
    same_key = charge_key(customer, period) == charge_key(other_customer, other_period)
    assert same_key == ((customer, period) == (other_customer, other_period))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a:b", "c"), ("a", "b:c")),
        (("a%3Ab", "c"), ("a:b", "c")),
        (("a%", "3Ab"), ("a%3Ab", "")),
        (("a:", "b"), ("a", ":b")),
    ],
)
def test_separators_inside_an_id_do_not_blur_two_customers(
    one: tuple[str, str], other: tuple[str, str]
) -> None:
    assert charge_key(*one) != charge_key(*other)


@given(IDS, IDS)
@settings(deadline=None)
def test_a_key_is_short_lower_case_hex(customer: str, period: str) -> None:
    for epoch in (0, 1, 12):
        assert re.fullmatch(r"[0-9a-f]{32}", idempotency_key(customer, period, epoch))


def test_every_epoch_has_a_key_of_its_own() -> None:
    keys = {idempotency_key("cust_1", "2026-Q3", epoch) for epoch in range(50)}
    assert len(keys) == 50


def test_a_period_that_looks_like_a_recharge_is_not_one() -> None:
    assert charge_key("c", f"p:{DEFAULT_NAMESPACE}:recharge-1") != idempotency_key("c", "p", 1)


def test_a_negative_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match="epoch"):
        idempotency_key("c", "p", -1)


def test_another_namespace_is_another_charge() -> None:
    assert charge_key("c", "p", "elsewhere") != charge_key("c", "p")


@pytest.mark.parametrize("namespace", ["", "a:b", "a%b", "a b", "x:recharge-1", "-a", "a" * 65])
def test_a_namespace_that_could_blur_keys_is_refused(namespace: str) -> None:
    with pytest.raises(ConfigurationError, match="namespace"):
        check_namespace(namespace)


def test_the_default_namespace_is_allowed() -> None:
    assert check_namespace(DEFAULT_NAMESPACE) == DEFAULT_NAMESPACE


MONEY = st.tuples(
    st.integers(1, 10**9), st.sampled_from(["usd", "jpy", "kwd"]), st.from_regex(r"cus_\w{1,9}")
)


@given(MONEY, MONEY)
@settings(deadline=None)
def test_a_fingerprint_tells_money_fields_apart(
    one: tuple[int, str, str], other: tuple[int, str, str]
) -> None:
    assert (fingerprint(*one) == fingerprint(*other)) == (one == other)


def test_a_fingerprint_never_changes_between_releases() -> None:
    # It is stored: another encoding would make a conflict out of every repeat.
    assert fingerprint(2500, "usd", "cus_T100") == "28c1c180e9f4bc6a2f96e4a82a421fd7"
