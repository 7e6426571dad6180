"""The billing event field by field: what is accepted, refused, cut or left out."""

from __future__ import annotations

import json

import pytest

from models.errors import EventRefused
from models.events import (
    MAX_EVENT_METADATA,
    OWN_METADATA,
    STRIPE_DESCRIPTION_CHARACTERS,
    STRIPE_METADATA_KEYS,
    check_payment_method,
    check_stripe_customer_id,
    decode_event,
    stripe_metadata,
)
from tests.support.events import PLAIN, decode, refusal


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
