"""The billing event: what becomes of a body, what a refusal tells, and what is stored."""

from __future__ import annotations

import base64
import json
import pickle
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from models.errors import DeadLetterReason, EventRefused
from models.events import (
    BillingEvent,
    decode_event,
    event_from_json,
)
from models.keys import charge_key
from tests.support.events import PLAIN, decode, refusal

CASES = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "cases" / "events.jsonl")
    .read_text("utf-8")
    .splitlines()
]


def body_of(case: dict[str, Any]) -> bytes:
    if "body_base64" in case:
        return base64.b64decode(case["body_base64"])
    body: str = case["body"]
    return body.encode()


def key_of(event: BillingEvent) -> str:
    return charge_key(event.customer_id, event.billing_period)


def by_expectation(*prefixes: str) -> list[dict[str, Any]]:
    return [case for case in CASES if case["expect"].startswith(prefixes)]


def name_of(case: dict[str, Any]) -> str:
    name: str = case["name"]
    return name


class TestTheAgreedCases:
    """Every line of the case file, as far as decoding decides it."""

    @pytest.mark.parametrize("case", by_expectation("charge", "settled:"), ids=name_of)
    def test_an_event_that_goes_to_stripe_decodes(self, case: dict[str, Any]) -> None:
        event = decode_event(body_of(case))
        sent = json.loads(body_of(case))
        assert event.amount_cents == case.get("amount_cents", sent["amount_cents"])
        assert event.currency == case.get("currency", "usd")

    @pytest.mark.parametrize("case", by_expectation("repeat_of:"), ids=name_of)
    def test_a_repeat_has_the_key_and_the_fingerprint_of_the_first(
        self, case: dict[str, Any]
    ) -> None:
        first_name = case["expect"].removeprefix("repeat_of:")
        first = decode_event(body_of(next(c for c in CASES if c["name"] == first_name)))
        repeat = decode_event(body_of(case))
        assert key_of(repeat) == key_of(first)
        assert repeat.fingerprint == first.fingerprint

    @pytest.mark.parametrize("case", by_expectation("dead_letter"), ids=name_of)
    def test_a_dead_letter_has_the_agreed_reason(self, case: dict[str, Any]) -> None:
        if case["reason"] == DeadLetterReason.PAYLOAD_CONFLICT:
            conflict = decode_event(body_of(case))
            earlier = [decode_event(body_of(c)) for c in by_expectation("charge")]
            first = next(event for event in earlier if key_of(event) == key_of(conflict))
            assert conflict.fingerprint != first.fingerprint
            return
        with pytest.raises(EventRefused) as caught:
            decode_event(body_of(case))
        assert caught.value.reason == case["reason"]

    def test_no_case_is_left_out(self) -> None:
        assert len(CASES) == len(by_expectation("charge", "settled:", "repeat_of:", "dead_letter"))


class TestDefaults:
    def test_optional_fields_have_defaults(self) -> None:
        event = decode()
        assert event == BillingEvent(
            customer_id="cust_100",
            billing_period="2026-Q3",
            amount_cents=2500,
            stripe_customer_id="cus_T100",
            currency="usd",
            payment_method=None,
            billing_run="2026-Q3",
            description="Usage billing for 2026-Q3",
            metadata={},
            event_id=None,
        )

    @pytest.mark.parametrize(
        "name",
        ["currency", "payment_method", "billing_run", "description", "metadata", "event_id"],
    )
    def test_an_optional_null_is_the_same_as_an_absent_field(self, name: str) -> None:
        assert decode(**{name: None}) == decode()

    @pytest.mark.parametrize(
        "name", ["customer_id", "billing_period", "amount_cents", "stripe_customer_id"]
    )
    def test_a_required_field_must_be_there_and_not_null(self, name: str) -> None:
        assert refusal(**{name: None}).reason == "invalid_event"
        without = {key: value for key, value in PLAIN.items() if key != name}
        with pytest.raises(EventRefused, match=f"invalid_event: {name} "):
            decode_event(json.dumps(without).encode())

    def test_given_values_are_kept(self) -> None:
        event = decode(
            currency="EUR",
            payment_method="pm_1",
            billing_run="2026-Q3/emea",
            description="July to September",
            metadata={"plan": "gold"},
            event_id="evt-1",
        )
        assert event.currency == "eur"
        assert event.payment_method == "pm_1"
        assert event.billing_run == "2026-Q3/emea"
        assert event.description == "July to September"
        assert event.metadata == {"plan": "gold"}
        assert event.event_id == "evt-1"

    def test_the_same_event_in_another_notation_has_the_same_fingerprint(self) -> None:
        assert decode(currency="USD").fingerprint == decode().fingerprint

    @pytest.mark.parametrize(
        "change", [{"amount_cents": 2501}, {"currency": "eur"}, {"stripe_customer_id": "cus_T101"}]
    )
    def test_another_money_field_is_another_fingerprint(self, change: dict[str, object]) -> None:
        assert decode(**change).fingerprint != decode().fingerprint

    def test_text_method_and_run_are_not_in_the_fingerprint(self) -> None:
        other = decode(description="x", payment_method="pm_2", billing_run="r", event_id="e")
        assert other.fingerprint == decode().fingerprint


class TestStoredForm:
    FULL: ClassVar[dict[str, Any]] = {
        **PLAIN,
        "currency": "EUR",
        "payment_method": "card_1",
        "billing_run": "r",
        "description": "d",
        "metadata": {"b": "2", "a": "1"},
        "event_id": "",
    }

    @pytest.mark.parametrize("fields", [PLAIN, FULL])
    def test_an_event_comes_back_from_its_json_unchanged(self, fields: dict[str, Any]) -> None:
        event = event_from_json(fields)
        assert event_from_json(json.loads(json.dumps(event.to_json()))) == event

    def test_a_stored_event_is_held_to_the_same_rules(self) -> None:
        with pytest.raises(EventRefused, match="amount_cents"):
            event_from_json({**PLAIN, "amount_cents": True})
        with pytest.raises(EventRefused, match="JSON object"):
            event_from_json([PLAIN])

    def test_the_stored_form_does_not_share_the_events_metadata(self) -> None:
        event = decode(metadata={"a": "1"})
        stored = event.to_json()["metadata"]
        assert isinstance(stored, dict)
        stored["a"] = "2"
        assert event.metadata == {"a": "1"}

    def test_an_event_is_a_value(self) -> None:
        event = decode(metadata={"a": "1"})
        assert len({event, decode(metadata={"a": "1"})}) == 1
        assert pickle.loads(pickle.dumps(event)) == event
        assert replace(event, amount_cents=1) != event
        with pytest.raises(FrozenInstanceError):
            event.amount_cents = 1  # type: ignore[misc]


class TestRefusals:
    def test_a_refusal_survives_pickling(self) -> None:
        refused = pickle.loads(pickle.dumps(refusal(amount_cents=0)))
        assert (refused.reason, str(refused)) == (
            "invalid_event",
            "invalid_event: amount_cents must be from 1 to 99999999",
        )

    @pytest.mark.parametrize("name", [*PLAIN, "billing_run", "payment_method", "currency"])
    def test_a_refusal_never_repeats_a_value(self, name: str) -> None:
        refused = refusal(**{name: "\tsecret.person@example.com"})
        assert "secret" not in str(refused)

    def test_a_refusal_holds_no_part_of_the_body(self) -> None:
        for body in (b'{"a": secret}', b'{"secret": 1, "secret": 2}', b"secret\xff"):
            with pytest.raises(EventRefused) as caught:
                decode_event(body)
            assert "secret" not in str(caught.value)
            assert caught.value.__context__ is None
