"""The billing event: what is accepted, what is refused, and what is stored."""

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
    MAX_EVENT_METADATA,
    OWN_METADATA,
    STRIPE_DESCRIPTION_CHARACTERS,
    STRIPE_METADATA_KEYS,
    BillingEvent,
    check_payment_method,
    check_stripe_customer_id,
    decode_event,
    event_from_json,
    stripe_metadata,
)
from models.keys import charge_key

PLAIN: dict[str, Any] = {
    "customer_id": "cust_100",
    "billing_period": "2026-Q3",
    "amount_cents": 2500,
    "stripe_customer_id": "cus_T100",
}
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


def decode(**changes: object) -> BillingEvent:
    return decode_event(json.dumps({**PLAIN, **changes}).encode())


def refusal(**changes: object) -> EventRefused:
    with pytest.raises(EventRefused) as caught:
        decode(**changes)
    return caught.value


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


class TestIdentityFields:
    FIELDS = ("customer_id", "billing_period", "billing_run")

    @pytest.mark.parametrize("name", FIELDS)
    @pytest.mark.parametrize(
        "value",
        [
            "",
            " ",
            " a",
            "a ",
            "\u00a0a",
            "a\u3000",
            "a\u2028",
            "a\tb",
            "a\nb",
            "a\x00b",
            "a\x7fb",
            "a\x85b",
            "a\x9fb",
            "\ud800",
            "a" * 256,
            7,
            1.5,
            True,
            ["a"],
            {"a": "b"},
        ],
        ids=ascii,
    )
    def test_a_bad_value_is_refused(self, name: str, value: object) -> None:
        refused = refusal(**{name: value})
        assert refused.reason == "invalid_event"
        assert refused.detail.startswith(f"{name} ")

    @pytest.mark.parametrize("name", FIELDS)
    @pytest.mark.parametrize(
        "value", ["a", "a b", "a" * 255, "2026-Q3/inv_42", "Zoë", "\U0001f4b3" * 255, "a:b", "%3A"]
    )
    def test_anything_else_is_opaque(self, name: str, value: str) -> None:
        assert getattr(decode(**{name: value}), name) == value

    @pytest.mark.parametrize(
        "value", ["cus_", "cus_a-b", "cus_a/b", "cus_a\n", "cus_é", "CUS_A", "acct_1", "", 1]
    )
    def test_a_stripe_customer_id_has_its_form(self, value: object) -> None:
        assert refusal(stripe_customer_id=value).detail.startswith("stripe_customer_id ")

    def test_a_stripe_customer_id_may_have_255_characters(self) -> None:
        longest = "cus_" + "a" * 251
        assert check_stripe_customer_id(longest) == longest
        with pytest.raises(EventRefused):
            check_stripe_customer_id(longest + "a")

    @pytest.mark.parametrize("value", ["pm_1", "card_1", "src_1Ab_c"])
    def test_a_payment_method_may_be_of_any_kind(self, value: str) -> None:
        assert check_payment_method(value) == value

    @pytest.mark.parametrize("value", ["pm_", "tok_1", "ba_1", "pm_1 ", "pm_1?x=y", "", 5])
    def test_anything_else_is_no_payment_method(self, value: object) -> None:
        assert refusal(payment_method=value).detail.startswith("payment_method ")


class TestAmounts:
    @pytest.mark.parametrize(
        "literal",
        ["0", "-0", "-1", "5e2", "5E2", "500.0", "1e999", "true", '"500"', "[500]", "{}", "9" * 30],
    )
    def test_only_a_positive_integer_is_an_amount(self, literal: str) -> None:
        body = json.dumps({**PLAIN, "amount_cents": "LITERAL"}).replace('"LITERAL"', literal)
        with pytest.raises(EventRefused, match="invalid_event: amount_cents "):
            decode_event(body.encode())

    def test_an_integer_without_end_is_refused_at_once(self) -> None:
        body = json.dumps(PLAIN).replace("2500", "9" * 250_000)
        with pytest.raises(EventRefused, match="invalid_event: amount_cents "):
            decode_event(body.encode())

    def test_the_maximum_is_a_setting(self) -> None:
        body = json.dumps({**PLAIN, "amount_cents": 2**31}).encode()
        with pytest.raises(EventRefused, match="amount_cents must be from 1 to 99999999"):
            decode_event(body)
        assert decode_event(body, max_amount_cents=2**40).amount_cents == 2**31

    @pytest.mark.parametrize(
        ("amount_cents", "currency"), [(1234, "kwd"), (1235, "BHD"), (550, "isk"), (101, "UGX")]
    )
    def test_an_amount_must_fit_its_currency(self, amount_cents: int, currency: str) -> None:
        refused = refusal(amount_cents=amount_cents, currency=currency)
        assert refused.detail.startswith("amount_cents must be a multiple of ")

    @pytest.mark.parametrize("currency", ["zzz", "", "us", "usd ", 840, ["usd"], "\u212awd"])
    def test_an_unknown_currency_is_refused(self, currency: object) -> None:
        assert refusal(currency=currency).detail.startswith("currency ")


class TestTexts:
    @pytest.mark.parametrize("name", ["description", "event_id"])
    @pytest.mark.parametrize("value", ["a\x00", "\udc00", 1, False, ["a"]], ids=ascii)
    def test_a_text_must_be_one_that_the_ledger_can_store(self, name: str, value: object) -> None:
        assert refusal(**{name: value}).detail.startswith(f"{name} ")

    def test_an_astral_character_in_escapes_is_one_character(self) -> None:
        body = json.dumps({**PLAIN, "description": "\U0001f4b3"}).encode()
        assert b"\\ud83d\\udcb3" in body
        assert decode_event(body).description == "\U0001f4b3"

    def test_a_long_description_is_cut_to_what_stripe_takes(self) -> None:
        assert decode(description="x" * 5000).description == "x" * STRIPE_DESCRIPTION_CHARACTERS

    @pytest.mark.parametrize("empty", ["", "  \n"])
    def test_an_empty_description_is_the_default(self, empty: str) -> None:
        # Stripe refuses an empty text, and the charge would be lost over it.
        assert decode(description=empty).description == "Usage billing for 2026-Q3"

    def test_the_default_description_fits_for_the_longest_period(self) -> None:
        period = "p" * 255
        event = decode(billing_period=period)
        assert event.description == f"Usage billing for {period}"
        assert len(event.description) <= STRIPE_DESCRIPTION_CHARACTERS


class TestMetadata:
    @pytest.mark.parametrize(
        "value",
        [
            [],
            "a",
            1,
            {"a": 1},
            {"a": None},
            {"a": {"b": "c"}},
            {"a": ["b"]},
            {"a": "\x00"},
            {"\x00": "a"},
            {"a": "\ud800"},
            {"\udfff": "a"},
        ],
        ids=ascii,
    )
    def test_metadata_must_be_a_flat_object_of_strings(self, value: object) -> None:
        refused = refusal(metadata=value)
        assert (refused.reason, refused.detail.split()[0]) == ("invalid_event", "metadata")

    def test_our_own_names_win(self) -> None:
        event = decode(metadata=dict.fromkeys([*OWN_METADATA, "plan"], "forged"))
        assert event.metadata == {"plan": "forged"}
        assert stripe_metadata(event, "k" * 32, 2) == {
            "plan": "forged",
            "charge_key": "k" * 32,
            "attempt_epoch": "2",
            "customer_id": "cust_100",
            "billing_period": "2026-Q3",
            "billing_run": "2026-Q3",
        }

    def test_it_is_cut_to_stripes_limits(self) -> None:
        names = [f"{number:03}{'n' * 60}" for number in range(200)]
        event = decode(metadata=dict.fromkeys(names, "v" * 900))
        sent = stripe_metadata(event, "k" * 32, 0)
        assert len(sent) == STRIPE_METADATA_KEYS
        assert len(event.metadata) == MAX_EVENT_METADATA
        assert max(map(len, sent)) == 40
        assert max(map(len, sent.values())) == 500
        assert set(OWN_METADATA) <= set(sent)

    def test_the_cut_does_not_depend_on_the_order_of_the_names(self) -> None:
        names = [f"{number:03}" for number in range(100)] + ["x" * 40 + "1", "x" * 40 + "0"]
        values = {name: f"value of {name}" for name in names}
        backwards = dict(reversed(values.items()))
        assert dict(decode(metadata=values).metadata) == dict(decode(metadata=backwards).metadata)

    def test_of_names_that_become_equal_the_first_in_order_stays(self) -> None:
        long = "x" * 40
        assert decode(metadata={f"{long}b": "2", f"{long}a": "1"}).metadata == {long: "1"}

    def test_what_stripe_cannot_take_as_metadata_is_left_out(self) -> None:
        metadata = {"a[b]": "1", "]": "2", "": "3", "empty": "", "kept": "4"}
        assert decode(metadata=metadata).metadata == {"kept": "4"}


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
