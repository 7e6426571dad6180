"""Validation of parameters, ahead of any execution: what fails here is not saved with the key."""

from __future__ import annotations

import re
from collections.abc import Mapping

from sandbox.stripe_simulator.messages import Json, StripeError
from sandbox.stripe_simulator.money import checked_amount, checked_currency

MAX_METADATA_KEYS = 50
MAX_METADATA_NAME = 40
MAX_METADATA_VALUE = 500
MAX_DESCRIPTION = 1000
MAX_SUFFIX = 22
DEFAULT_PAGE = 10
MAX_PAGE = 100

_INTENT_PARAMETERS = """
allowed_payment_method_types amount amount_details application_fee_amount
automatic_payment_methods capture_method confirm confirmation_method confirmation_token currency
customer customer_account description error_on_requires_action excluded_payment_method_types
expand hooks mandate mandate_data metadata off_session on_behalf_of payment_details
payment_method payment_method_configuration payment_method_data payment_method_options
payment_method_types radar_options receipt_email return_url setup_future_usage shipping
statement_descriptor statement_descriptor_suffix transfer_data transfer_group use_stripe_sdk
"""
INTENT_PARAMETERS = frozenset(_INTENT_PARAMETERS.split())
_CHARGE_PARAMETERS = """
amount application_fee application_fee_amount capture currency customer description destination
expand metadata on_behalf_of radar_options receipt_email shipping source statement_descriptor
statement_descriptor_suffix transfer_data transfer_group
"""
CHARGE_PARAMETERS = frozenset(_CHARGE_PARAMETERS.split())
_CUSTOMER_PARAMETERS = """
address balance cash_balance default_source description email expand invoice_prefix
invoice_settings metadata name next_invoice_sequence payment_method phone preferred_locales
shipping source tax tax_exempt tax_id_data test_clock validate
"""
CUSTOMER_PARAMETERS = frozenset(_CUSTOMER_PARAMETERS.split())
CANCEL_PARAMETERS = frozenset({"cancellation_reason", "expand"})
LIST_PARAMETERS = frozenset(
    {"created", "customer", "ending_before", "expand", "limit", "starting_after", "type"}
)
CHARGE_LIST_PARAMETERS = LIST_PARAMETERS | {"payment_intent", "transfer_group"}
RETRIEVE_PARAMETERS = frozenset({"client_secret", "expand"})

_METADATA = re.compile(r"metadata\[([^\[\]]+)\]\Z")
_CREATED = re.compile(r"created\[(gte|gt|lte|lt)\]\Z")
_SUFFIX = re.compile(r"(?=.*[A-Za-z])[\x20-\x7e\u00c0-\u024f]+\Z")
_SUFFIX_REFUSED = frozenset("<>\\'\"*")
_COMPARISONS = {"gte": ">=", "gt": ">", "lte": "<=", "lt": "<"}


def check_known(given: Mapping[str, str], known: frozenset[str]) -> None:
    """Refuses the first parameter that the endpoint does not have."""
    for name in given:
        if name.partition("[")[0] not in known:
            raise StripeError(
                400,
                f"Received unknown parameter: {name[:80]}",
                code="parameter_unknown",
                param=name[:80],
            )


def metadata_of(given: Mapping[str, str]) -> dict[str, str]:
    """The metadata within Stripe's limits; an empty value leaves its name out."""
    found: dict[str, str] = {}
    for name, value in given.items():
        match = _METADATA.match(name)
        if match is None:
            if name.startswith("metadata[") or (name == "metadata" and value):
                raise StripeError(400, "Invalid metadata", param=name[:80])
            continue
        key = match[1]
        if len(key) > MAX_METADATA_NAME:
            raise StripeError(
                400,
                f"Metadata keys can have up to {MAX_METADATA_NAME} characters",
                param="metadata",
            )
        if len(value) > MAX_METADATA_VALUE:
            raise StripeError(
                400,
                f"Metadata values can have up to {MAX_METADATA_VALUE} characters",
                param=f"metadata[{key}]",
            )
        if value:
            found[key] = value
    if len(found) > MAX_METADATA_KEYS:
        raise StripeError(
            400, f"Metadata can have up to {MAX_METADATA_KEYS} keys", param="metadata"
        )
    return found


def boolean(given: Mapping[str, str], name: str, default: bool = False) -> bool:
    """A form boolean. Raises StripeError for anything but true and false."""
    value = given.get(name)
    if value is None or value == "":
        return default
    if value not in {"true", "false"}:
        raise StripeError(400, f"Invalid boolean: {value[:40]}", param=name)
    return value == "true"


def payment_fields(given: Mapping[str, str], known: frozenset[str]) -> Json:
    """What both ways of charging take: amount, currency, customer, metadata and texts."""
    check_known(given, known)
    for name in ("amount", "currency"):
        if not given.get(name):
            raise StripeError(
                400,
                f"Missing required param: {name}.",
                code="parameter_missing",
                param=name,
            )
    fields: Json = {
        "amount": checked_amount(given["amount"]),
        "currency": checked_currency(given["currency"]),
        "customer": given.get("customer") or None,
        "metadata": metadata_of(given),
        "description": _text(given, "description", MAX_DESCRIPTION),
        "receipt_email": given.get("receipt_email") or None,
        "statement_descriptor_suffix": _suffix(given),
    }
    return fields


def intent_fields(given: Mapping[str, str]) -> Json:
    """The checked parameters of POST /v1/payment_intents."""
    fields = payment_fields(given, INTENT_PARAMETERS)
    fields["confirm"] = boolean(given, "confirm")
    off_session = given.get("off_session")
    fields["off_session"] = off_session in {"one_off", "recurring"} or boolean(given, "off_session")
    fields["error_on_requires_action"] = boolean(given, "error_on_requires_action")
    for name in ("off_session", "error_on_requires_action"):
        if fields[name] and not fields["confirm"]:
            raise StripeError(400, f"{name} needs confirm=true.", param=name)
    if given.get("statement_descriptor"):
        raise StripeError(
            400,
            "statement_descriptor is not taken for cards; use statement_descriptor_suffix.",
            param="statement_descriptor",
        )
    fields["capture_method"] = given.get("capture_method") or "automatic_async"
    if fields["capture_method"] not in {"automatic", "automatic_async", "manual"}:
        raise StripeError(400, "Invalid capture_method", param="capture_method")
    fields["payment_method"] = given.get("payment_method") or None
    return fields


def charge_fields(given: Mapping[str, str]) -> Json:
    """The checked parameters of POST /v1/charges."""
    fields = payment_fields(given, CHARGE_PARAMETERS)
    fields["capture"] = boolean(given, "capture", default=True)
    fields["payment_method"] = given.get("source") or None
    if not fields["payment_method"] and not fields["customer"]:
        raise StripeError(400, "Must provide source or customer.", code="parameter_missing")
    return fields


def page_size(given: Mapping[str, str]) -> int:
    """`limit`: 1 … 100, by default 10."""
    text = given.get("limit")
    if not text:
        return DEFAULT_PAGE
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= MAX_PAGE:
        raise StripeError(
            400,
            f"Invalid limit: must be between 1 and {MAX_PAGE}.",
            code="parameter_invalid_integer",
            param="limit",
        )
    return int(text)


def created_bounds(given: Mapping[str, str]) -> list[tuple[str, int]]:
    """`created` and `created[gte|gt|lte|lt]` as SQL comparisons with unix seconds."""
    bounds: list[tuple[str, int]] = []
    for name, value in given.items():
        if name.partition("[")[0] != "created":
            continue
        match = _CREATED.match(name)
        if (match is None and name != "created") or not (value.isascii() and value.isdigit()):
            raise StripeError(
                400, "Invalid timestamp", code="parameter_invalid_integer", param=name[:80]
            )
        bounds.append((_COMPARISONS[match[1]] if match else "=", int(value)))
    return bounds


def _text(given: Mapping[str, str], name: str, longest: int) -> str | None:
    value = given.get(name) or None
    if value is not None and len(value) > longest:
        raise StripeError(400, f"Invalid string: at most {longest} characters", param=name)
    return value


def _suffix(given: Mapping[str, str]) -> str | None:
    value = _text(given, "statement_descriptor_suffix", MAX_SUFFIX)
    if value is None:
        return None
    if not _SUFFIX.match(value) or _SUFFIX_REFUSED & set(value):
        raise StripeError(
            400,
            "The suffix must be Latin, hold a letter and none of < > \\ ' \" *",
            param="statement_descriptor_suffix",
        )
    return value
