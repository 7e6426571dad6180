"""Outcomes, validation, lists and customers, as Stripe documents them."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest

from tests.contract.simulator_fixtures import (
    CHARGES,
    INTENTS,
    KEY,
    Simulator,
    payment,
    running_simulator,
)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulator]:
    with running_simulator(tmp_path_factory.mktemp("simulator")) as simulator:
        yield simulator


@pytest.fixture
def stripe(process: Simulator) -> Simulator:
    process.reset()
    return process


# --- who may ask ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("api_key", "status"),
    [
        (None, 401),
        ("sk_live_x", 401),
        ("nonsense", 401),
        ("sk_test_bad_key", 401),
        ("sk_test_forbidden", 403),
        ("sk_test_x", 200),
        ("rk_test_x", 200),
    ],
)
def test_any_test_key_will_do_but_a_key_there_must_be(
    stripe: Simulator, api_key: str | None, status: int
) -> None:
    answer = stripe.call("POST", INTENTS, payment(), api_key=api_key)

    assert answer.status == status
    assert len(stripe.charges()) == (1 if status == 200 else 0)


def test_basic_authorization_works_as_with_curl(stripe: Simulator) -> None:
    basic = base64.b64encode(f"{KEY}:".encode()).decode()

    answer = stripe.call("GET", "/v1/account", api_key=None, headers={"Authorization": basic})
    assert answer.status == 401
    sent = {"Authorization": f"Basic {basic}"}
    assert stripe.call("GET", "/v1/account", api_key=None, headers=sent).status == 200


def test_every_reply_says_that_it_comes_from_a_simulator(stripe: Simulator) -> None:
    answers = [
        stripe.create(),
        stripe.create(payment("cus_missing")),
        stripe.call("GET", "/v1/nothing"),
        stripe.call("GET", "/v1/account", api_key=None),
    ]

    for answer in answers:
        assert answer.headers["x-stripe-simulator"] == "chargebridge"
        assert answer.headers["request-id"].startswith("req_")
    assert [answer.status for answer in answers] == [200, 400, 404, 401]
    assert stripe.get("/_sim/health").headers["x-stripe-simulator"] == "chargebridge"


def test_the_version_asked_for_comes_back(stripe: Simulator) -> None:
    answer = stripe.call("GET", "/v1/account", headers={"Stripe-Version": "2024-01-01"})

    assert answer.headers["stripe-version"] == "2024-01-01"
    assert answer.json["id"] == "acct_simulator"


# --- outcomes ------------------------------------------------------------------------------


def test_a_good_card_pays_at_once(stripe: Simulator) -> None:
    form = payment(
        payment_method="pm_T1_visa",
        description="Usage",
        **{"metadata[charge_key]": "ck", "metadata[billing_period]": "2026-Q3"},
    )
    intent = stripe.create(form, "k1").json

    assert intent["status"] == "succeeded"
    assert (intent["amount"], intent["amount_received"]) == (2500, 2500)
    assert intent["metadata"] == {"charge_key": "ck", "billing_period": "2026-Q3"}
    assert intent["description"] == "Usage"
    charge = stripe.get(f"{CHARGES}/{intent['latest_charge']}").json
    assert (charge["status"], charge["paid"], charge["captured"]) == ("succeeded", True, True)
    assert (charge["payment_intent"], charge["customer"]) == (intent["id"], "cus_T1")
    (taken,) = stripe.charges()
    assert taken["id"] == charge["id"]
    assert (taken["amount"], taken["currency"], taken["customer"]) == (2500, "usd", "cus_T1")
    assert taken["idempotency_key"] == "k1"
    assert taken["metadata"] == intent["metadata"]
    assert taken["created"] == charge["created"]


@pytest.mark.parametrize(
    ("customer", "code", "decline_code"),
    [
        ("cus_decline_insufficient_funds", "card_declined", "insufficient_funds"),
        ("cus_decline_insufficient_funds_17", "card_declined", "insufficient_funds"),
        ("cus_decline_lost_cardX9", "card_declined", "lost_card"),
        ("cus_decline_generic_decline", "card_declined", "generic_decline"),
        ("cus_decline_expired_card_2", "expired_card", "expired_card"),
        ("cus_decline_brand_new_reason_3", "card_declined", "brand_new_reason"),
        ("cus_decline_", "card_declined", "generic_decline"),
    ],
)
def test_a_customer_declines_as_its_name_says(
    stripe: Simulator, customer: str, code: str, decline_code: str
) -> None:
    default = stripe.get(f"/v1/customers/{customer}").json["invoice_settings"]
    for form in (
        payment(customer),
        payment(customer, payment_method=default["default_payment_method"]),
    ):
        answer = stripe.create(form)
        assert (answer.status, answer.error["type"]) == (402, "card_error")
        assert (answer.error["code"], answer.error["decline_code"]) == (code, decline_code)
    assert stripe.charges() == []


def test_a_decline_leaves_an_open_intent_and_a_failed_charge(stripe: Simulator) -> None:
    error = stripe.create(payment("cus_decline_lost_card")).error

    (intent,) = stripe.listed("cus_decline_lost_card")
    assert intent == error["payment_intent"]
    assert intent["status"] == "requires_payment_method"
    assert intent["last_payment_error"]["decline_code"] == "lost_card"
    (charge,) = stripe.listed("cus_decline_lost_card", CHARGES)
    assert (charge["id"], charge["status"], charge["paid"]) == (error["charge"], "failed", False)
    assert charge["failure_code"] == "card_declined"


@pytest.mark.parametrize(
    ("method", "status", "decline_code"),
    [
        ("pm_card_visa", 200, None),
        ("pm_card_mastercard", 200, None),
        ("card_1abc", 200, None),
        ("src_1abc", 200, None),
        ("pm_card_visa_chargeDeclined", 402, "generic_decline"),
        ("pm_card_chargeDeclined", 402, "generic_decline"),
        ("pm_card_visa_chargeDeclinedInsufficientFunds", 402, "insufficient_funds"),
        ("pm_card_chargeDeclinedLostCard", 402, "lost_card"),
        ("pm_card_visa_chargeDeclinedStolenCard", 402, "stolen_card"),
        ("pm_card_chargeDeclinedExpiredCard", 402, "expired_card"),
        ("pm_card_chargeDeclinedIncorrectCvc", 402, "incorrect_cvc"),
        ("pm_card_chargeDeclinedProcessingError", 402, "processing_error"),
        ("pm_card_visa_chargeDeclinedVelocityLimitExceeded", 402, "card_velocity_exceeded"),
        ("pm_card_chargeCustomerFail", 402, "generic_decline"),
        ("pm_card_authenticationRequired", 402, "authentication_required"),
        ("pm_card_authenticationRequiredOnSetup", 402, "authentication_required"),
    ],
)
def test_the_known_test_cards(
    stripe: Simulator, method: str, status: int, decline_code: str | None
) -> None:
    answer = stripe.create(payment(payment_method=method))

    assert answer.status == status
    if decline_code is not None:
        assert answer.error["decline_code"] == decline_code


@pytest.mark.parametrize("customer", ["cus_decline_lost_card", "cus_auth1", "cus_processing1"])
def test_an_explicit_payment_method_wins_over_the_customer(
    stripe: Simulator, customer: str
) -> None:
    assert (
        stripe.create(payment(customer, payment_method="pm_card_visa")).json["status"]
        == "succeeded"
    )
    declined = stripe.create(payment("cus_T1", payment_method="pm_decline_lost_card"))
    assert declined.error["decline_code"] == "lost_card"


def test_authentication_off_session_is_a_402_with_an_open_intent(stripe: Simulator) -> None:
    answer = stripe.create(payment("cus_auth7"), "k1")

    assert (answer.status, answer.error["code"]) == (402, "authentication_required")
    assert answer.error["decline_code"] == "authentication_required"
    assert answer.error["payment_intent"]["status"] == "requires_payment_method"
    assert stripe.charges() == []

    stripe.complete(answer.error["payment_intent"]["id"])

    (taken,) = stripe.charges()
    assert (taken["customer"], taken["idempotency_key"]) == ("cus_auth7", "k1")
    assert stripe.listed("cus_auth7")[0]["status"] == "succeeded"


def test_authentication_on_session_is_a_200_that_is_not_paid(stripe: Simulator) -> None:
    form = payment("cus_auth7", off_session="false")
    answer = stripe.create(form)

    assert (answer.status, answer.json["status"]) == (200, "requires_action")
    assert stripe.charges() == []
    stripe.complete(answer.json["id"])
    assert len(stripe.charges()) == 1


@pytest.mark.parametrize(
    ("outcome", "status", "taken"),
    [("succeeded", "succeeded", 1), ("failed", "requires_payment_method", 0)],
)
def test_processing_stays_so_until_it_is_settled(
    stripe: Simulator, outcome: str, status: str, taken: int
) -> None:
    intent = stripe.create(payment("cus_processing_3")).json
    assert intent["status"] == "processing"
    assert stripe.charges() == []
    assert stripe.listed("cus_processing_3", CHARGES)[0]["status"] == "pending"

    stripe.settle(intent["id"], outcome)

    after = stripe.get(f"{INTENTS}/{intent['id']}").json
    assert after["status"] == status
    assert (after["last_payment_error"] is None) == (outcome == "succeeded")
    assert len(stripe.charges()) == taken


def test_only_what_is_open_can_be_completed_and_only_processing_settled(
    stripe: Simulator,
) -> None:
    paid = stripe.create().json["id"]

    for action in (stripe.complete, stripe.settle):
        with pytest.raises(OSError, match="status 400"):
            action(paid)
    with pytest.raises(OSError, match="status 404"):
        stripe.complete("pi_nowhere")
    assert len(stripe.charges()) == 1


def test_without_confirm_no_money_moves(stripe: Simulator) -> None:
    form = {"amount": 2500, "currency": "usd", "customer": "cus_nopm"}
    assert stripe.create(form).json["status"] == "requires_payment_method"
    form["payment_method"] = "pm_card_visa"
    assert stripe.create(form).json["status"] == "requires_confirmation"
    assert stripe.charges() == []


def test_manual_capture_is_not_money_taken(stripe: Simulator) -> None:
    assert stripe.create(payment(capture_method="manual")).json["status"] == "requires_capture"
    assert stripe.charges() == []


# --- cancel --------------------------------------------------------------------------------


@pytest.mark.parametrize("customer", ["cus_auth", "cus_decline_lost_card"])
def test_an_open_intent_can_be_canceled_and_then_not_paid(stripe: Simulator, customer: str) -> None:
    intent = stripe.create(payment(customer)).error["payment_intent"]["id"]

    canceled = stripe.call(
        "POST", f"{INTENTS}/{intent}/cancel", {"cancellation_reason": "abandoned"}, key="c1"
    )

    assert canceled.json["status"] == "canceled"
    assert canceled.json["cancellation_reason"] == "abandoned"
    with pytest.raises(OSError, match="status 400"):
        stripe.complete(intent)
    assert stripe.call("POST", f"{INTENTS}/{intent}/cancel").status == 400


@pytest.mark.parametrize("customer", ["cus_T1", "cus_processing"])
def test_a_paid_or_processing_intent_cannot_be_canceled(stripe: Simulator, customer: str) -> None:
    intent = stripe.create(payment(customer)).json

    refused = stripe.call("POST", f"{INTENTS}/{intent['id']}/cancel")

    assert (refused.status, refused.error["code"]) == (400, "payment_intent_unexpected_state")
    assert refused.error["payment_intent"]["status"] == intent["status"]
    assert stripe.get(f"{INTENTS}/{intent['id']}").json == intent


# --- validation ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("amount", "currency", "code"),
    [
        (49, "usd", "amount_too_small"),
        (50, "usd", None),
        (29, "gbp", "amount_too_small"),
        (30, "gbp", None),
        (49, "jpy", "amount_too_small"),
        (500, "jpy", None),
        (99_999_999, "usd", None),
        (100_000_000, "usd", "amount_too_large"),
        (1234, "kwd", "invalid_charge_amount"),
        (1230, "kwd", None),
        (0, "usd", "parameter_invalid_integer"),
        (-500, "usd", "parameter_invalid_integer"),
        ("5e2", "usd", "parameter_invalid_integer"),
        ("500.0", "usd", "parameter_invalid_integer"),
        ("9" * 30, "usd", "parameter_invalid_integer"),
    ],
)
def test_amounts(stripe: Simulator, amount: object, currency: str, code: str | None) -> None:
    answer = stripe.create(payment(amount=amount, currency=currency))

    assert answer.status == (200 if code is None else 400)
    if code is not None:
        assert (answer.error["code"], answer.error["param"]) == (code, "amount")
    assert len(stripe.charges()) == (1 if code is None else 0)


def test_a_refused_amount_leaves_no_intent(stripe: Simulator) -> None:
    stripe.create(payment(amount=30))
    stripe.create(payment(payment_method="pm_missing"))

    assert stripe.listed() == []


def test_the_currency_may_be_written_in_capitals_and_must_exist(stripe: Simulator) -> None:
    assert stripe.create(payment(currency="JPY")).json["currency"] == "jpy"
    refused = stripe.create(payment(currency="zzz"))
    assert (refused.status, refused.error["param"]) == (400, "currency")


@pytest.mark.parametrize("missing", ["amount", "currency"])
def test_a_required_parameter(stripe: Simulator, missing: str) -> None:
    form = payment()
    del form[missing]
    error = stripe.create(form).error

    assert (error["code"], error["param"]) == ("parameter_missing", missing)


@pytest.mark.parametrize("path", [INTENTS, CHARGES])
def test_an_unknown_parameter(stripe: Simulator, path: str) -> None:
    form = {"amount": 2500, "currency": "usd", "customer": "cus_T1", "idempotency_key": "k"}
    error = stripe.call("POST", path, form).error

    assert (error["code"], error["param"]) == ("parameter_unknown", "idempotency_key")


@pytest.mark.parametrize(
    ("metadata", "status"),
    [
        ({"n" * 40: "v" * 500}, 200),
        ({"n" * 41: "v"}, 400),
        ({"n": "v" * 501}, 400),
        ({f"n{i}": "v" for i in range(50)}, 200),
        ({f"n{i}": "v" for i in range(51)}, 400),
        ({"ключ": "значение ✓ 😀"}, 200),
    ],
)
def test_metadata_limits(stripe: Simulator, metadata: dict[str, str], status: int) -> None:
    form = payment(**{f"metadata[{name}]": value for name, value in metadata.items()})
    answer = stripe.create(form)

    assert answer.status == status
    if status == 200:
        assert answer.json["metadata"] == metadata
        assert stripe.charges()[0]["metadata"] == metadata


@pytest.mark.parametrize(
    ("suffix", "status"),
    [("2026-Q3 usage", 200), ("12345", 400), ("a*b", 400), ("кириллица", 400), ("x" * 23, 400)],
)
def test_the_statement_suffix(stripe: Simulator, suffix: str, status: int) -> None:
    assert stripe.create(payment(statement_descriptor_suffix=suffix)).status == status


def test_cards_take_no_whole_statement_descriptor(stripe: Simulator) -> None:
    assert stripe.create(payment(statement_descriptor="ACME")).status == 400


def test_off_session_goes_with_confirm_only(stripe: Simulator) -> None:
    form = payment(confirm="false")
    assert stripe.create(form).error["param"] == "off_session"


def test_a_body_that_is_not_utf8_is_refused(stripe: Simulator) -> None:
    answer = stripe.call("POST", INTENTS, {"amount": b"\xff\xfe", "currency": "usd"})

    assert answer.status == 400


# --- customers -----------------------------------------------------------------------------


def test_any_customer_exists_with_a_good_card(stripe: Simulator) -> None:
    customer = stripe.get("/v1/customers/cus_Anybody_1").json

    method = customer["invoice_settings"]["default_payment_method"]
    assert method.startswith("pm_")
    listed = stripe.get("/v1/customers/cus_Anybody_1/payment_methods").json["data"]
    assert [found["id"] for found in listed] == [method]
    assert stripe.get(f"/v1/payment_methods/{method}").json["type"] == "card"
    assert stripe.create(payment("cus_Anybody_1", payment_method=method)).status == 200
    assert stripe.create(payment("cus_Anybody_1")).status == 200


@pytest.mark.parametrize("customer", ["cus_missing", "cus_missing_2", "nobody"])
def test_a_missing_customer_is_missing_everywhere(stripe: Simulator, customer: str) -> None:
    read = stripe.call("GET", f"/v1/customers/{customer}")
    create = stripe.create(payment(customer, payment_method="pm_card_visa"))
    listing = stripe.call("GET", INTENTS, {"customer": customer})

    assert [a.status for a in (read, create, listing)] == [404, 400, 400]
    for answer in (read, create, listing):
        assert answer.error["type"] == "invalid_request_error"
        assert answer.error["code"] == "resource_missing"
    assert create.error["param"] == "customer"
    assert stripe.charges() == []


def test_a_customer_without_a_payment_method(stripe: Simulator) -> None:
    customer = stripe.get("/v1/customers/cus_nopm").json
    assert customer["invoice_settings"]["default_payment_method"] is None
    assert customer["default_source"] is None
    assert stripe.get("/v1/customers/cus_nopm/payment_methods").json["data"] == []

    refused = stripe.create(payment("cus_nopm"))
    assert refused.error["code"] == "payment_intent_unexpected_state"
    assert stripe.create(payment("cus_nopm", payment_method="pm_card_visa")).status == 200


def test_only_the_default_source_stands_in_for_a_payment_method(stripe: Simulator) -> None:
    for_invoices = stripe.call(
        "POST", "/v1/customers", {"invoice_settings[default_payment_method]": "pm_card_visa"}
    ).json
    assert for_invoices["default_source"] is None
    by_source = stripe.call("POST", "/v1/customers", {"source": "card_1"}).json
    assert by_source["invoice_settings"]["default_payment_method"] is None

    assert stripe.create(payment(for_invoices["id"])).status == 400
    assert stripe.create(payment(by_source["id"])).json["payment_method"] == "card_1"


def test_a_customers_card_can_be_changed(stripe: Simulator) -> None:
    path = "/v1/customers/cus_decline_lost_card"
    changed = stripe.call("POST", path, {"invoice_settings[default_payment_method]": "pm_card_x"})

    assert changed.status == 200
    method = stripe.get(path).json["invoice_settings"]["default_payment_method"]
    assert method == "pm_card_x"
    assert stripe.create(payment("cus_decline_lost_card", payment_method=method)).status == 200
    refused = stripe.call("POST", path, {"default_source": "card_missing"})
    assert refused.error["code"] == "resource_missing"


def test_a_deleted_customer_cannot_be_charged_but_its_past_can_be_listed(
    stripe: Simulator,
) -> None:
    stripe.create(payment("cus_T9"))
    assert stripe.call("DELETE", "/v1/customers/cus_T9").json["deleted"] is True

    assert stripe.get("/v1/customers/cus_T9").json["deleted"] is True
    assert stripe.create(payment("cus_T9")).error["code"] == "resource_missing"
    assert len(stripe.listed("cus_T9")) == 1


# --- the Charges API -----------------------------------------------------------------------


def test_a_charge_takes_money_from_the_source_or_the_default_source(stripe: Simulator) -> None:
    form = {"amount": 700, "currency": "eur", "customer": "cus_T1", "metadata[charge_key]": "ck"}
    charge = stripe.call("POST", CHARGES, form, key="k1").json

    assert (charge["object"], charge["status"], charge["paid"]) == ("charge", "succeeded", True)
    assert charge["payment_intent"] is None
    (taken,) = stripe.charges()
    assert (taken["id"], taken["idempotency_key"]) == (charge["id"], "k1")
    assert stripe.listed(path=CHARGES) == [charge]
    assert stripe.listed(path=INTENTS) == []
    declined = stripe.call("POST", CHARGES, {**form, "source": "tok_chargeDeclined"})
    assert declined.status == 402


@pytest.mark.parametrize(
    ("customer", "code"),
    [
        ("cus_decline_lost_card", "card_declined"),
        ("cus_auth", "authentication_required"),
        ("cus_nopm", "missing"),
    ],
)
def test_a_failed_charge(stripe: Simulator, customer: str, code: str) -> None:
    form = {"amount": 700, "currency": "eur", "customer": customer}
    answer = stripe.call("POST", CHARGES, form)

    assert (answer.status, answer.error["type"]) == (402, "card_error")
    assert answer.error["code"] == code
    assert "payment_intent" not in answer.error
    failed = stripe.listed(customer, CHARGES)
    assert [charge["status"] for charge in failed] == ([] if code == "missing" else ["failed"])
    assert stripe.charges() == []


def test_a_pending_charge_is_settled_later(stripe: Simulator) -> None:
    form = {"amount": 700, "currency": "eur", "customer": "cus_processing"}
    charge = stripe.call("POST", CHARGES, form).json
    assert charge["status"] == "pending"
    stripe.settle(charge["id"])

    assert len(stripe.charges()) == 1


def test_refunds_and_disputes_show_in_the_charge(stripe: Simulator) -> None:
    intent = stripe.create().json
    for action, body in (("refund", {"amount": 1000}), ("refund", {}), ("dispute", {})):
        stripe._post(action, {"id": intent["id"], **body})

    charge = stripe.get(f"{CHARGES}/{intent['latest_charge']}").json
    assert (charge["amount_refunded"], charge["refunded"], charge["disputed"]) == (2500, True, True)
    assert len(stripe.charges()) == 1


# --- lists ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [INTENTS, CHARGES])
def test_a_list_is_consistent_at_once_and_newest_first(stripe: Simulator, path: str) -> None:
    made = [stripe.create(payment(**{"metadata[n]": str(n)})).json for n in range(12)]

    page = stripe.get(path).json
    assert (page["object"], page["url"], page["has_more"]) == ("list", path, True)
    assert [found["metadata"]["n"] for found in page["data"]] == [
        intent["metadata"]["n"] for intent in reversed(made[2:])
    ]


def test_pages_forward_and_backward(stripe: Simulator) -> None:
    ids = [stripe.create().json["id"] for _ in range(7)][::-1]
    stripe.create(payment("cus_other"))

    def page(**more: object) -> tuple[list[str], bool]:
        found = stripe.get(INTENTS, customer="cus_T1", limit=3, **more).json
        return [intent["id"] for intent in found["data"]], found["has_more"]

    assert page() == (ids[:3], True)
    assert page(starting_after=ids[2]) == (ids[3:6], True)
    assert page(starting_after=ids[5]) == (ids[6:], False)
    assert page(ending_before=ids[6]) == (ids[3:6], True)
    assert page(ending_before=ids[3]) == (ids[:3], False)


def test_created_bounds_follow_the_clock(stripe: Simulator) -> None:
    old = stripe.create().json
    stripe.clock(3600)
    new = stripe.create().json

    def found(**bounds: int) -> list[str]:
        form = {f"created[{name}]": moment for name, moment in bounds.items()}
        page = stripe.call("GET", INTENTS, {"customer": "cus_T1", **form}).json
        return [intent["id"] for intent in page["data"]]

    assert new["created"] - old["created"] in {3600, 3601}
    assert found(gte=old["created"]) == [new["id"], old["id"]]
    assert found(gt=old["created"]) == [new["id"]]
    assert found(lt=new["created"]) == [old["id"]]
    assert found(gt=old["created"], lte=new["created"]) == [new["id"]]
    assert found(gt=new["created"]) == []


@pytest.mark.parametrize(
    "form",
    [
        {"limit": 0},
        {"limit": 101},
        {"limit": "x"},
        {"starting_after": "pi_nowhere"},
        {"created[gte]": "yesterday"},
        {"metadata[charge_key]": "x"},
    ],
)
def test_a_list_refuses_what_it_does_not_know(stripe: Simulator, form: dict[str, object]) -> None:
    assert stripe.call("GET", INTENTS, form).status == 400


def test_charges_of_one_intent(stripe: Simulator) -> None:
    intent = stripe.create().json
    stripe.create()

    found = stripe.get(CHARGES, payment_intent=intent["id"]).json["data"]
    assert [charge["id"] for charge in found] == [intent["latest_charge"]]


def test_objects_can_be_expanded(stripe: Simulator) -> None:
    intent = stripe.create(payment(**{"expand[]": "latest_charge"})).json
    assert intent["latest_charge"]["object"] == "charge"
    again = stripe.call("GET", f"{INTENTS}/{intent['id']}", {"expand[0]": "customer"}).json
    assert again["customer"]["object"] == "customer"
    page = stripe.call("GET", INTENTS, {"expand[]": "data.latest_charge"}).json
    assert page["data"][0]["latest_charge"]["paid"] is True


@pytest.mark.parametrize(
    "path", [f"{INTENTS}/pi_x", f"{CHARGES}/ch_x", "/v1/payment_methods/pm_missing", "/v1/nothing"]
)
def test_what_is_not_there_is_a_404(stripe: Simulator, path: str) -> None:
    answer = stripe.call("GET", path)

    assert (answer.status, answer.error["type"]) == (404, "invalid_request_error")
