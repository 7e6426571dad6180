"""What a charge comes to: read from the name of the payment method or of the customer.

Nothing has to be set up. A customer `cus_decline_<code>…` has a default payment method
`pm_decline_<code>…` that declines so; `cus_auth…` and `cus_processing…` likewise. Stripe's own test
names work too. Every other name is a good card.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Result = Literal["succeeds", "declines", "needs_authentication", "processes"]

_DECLINE_CODES = """
approve_with_id authentication_not_handled authentication_required call_issuer card_not_supported
card_velocity_exceeded currency_not_supported do_not_honor do_not_try_again duplicate_transaction
expired_card fraudulent generic_decline highest_risk_level incorrect_address incorrect_cvc
incorrect_number incorrect_pin incorrect_zip insufficient_funds invalid_account invalid_amount
invalid_cvc invalid_expiry_month invalid_expiry_year invalid_number invalid_pin
issuer_not_available lost_card merchant_blacklist mobile_device_authentication_required
new_account_information_available no_action_taken not_permitted offline_pin_required
online_or_offline_pin_required partial_approval_not_supported pickup_card pin_try_exceeded
processing_error reenter_transaction restricted_card revocation_of_all_authorizations
revocation_of_authorization security_violation service_not_allowed stolen_card stop_payment_order
testmode_decline transaction_not_allowed try_again_later withdrawal_count_limit_exceeded
"""
#: Decline codes that Stripe documents; the longest one that a name starts with is meant.
DECLINE_CODES = tuple(sorted(_DECLINE_CODES.split(), key=len, reverse=True))

#: Declines whose error code is their own and not `card_declined`.
CODES_OF_THEIR_OWN = frozenset(
    {
        "authentication_required",
        "expired_card",
        "incorrect_cvc",
        "incorrect_number",
        "incorrect_zip",
        "invalid_cvc",
        "invalid_expiry_month",
        "invalid_expiry_year",
        "invalid_number",
        "processing_error",
    }
)

#: Kinds of payment method id; `tok_` only names a source of the Charges API.
METHOD_ID = re.compile(r"(?P<kind>pm|card|src|tok)_(?P<name>\w{1,5000})\Z", re.ASCII)
CUSTOMER_ID = re.compile(r"cus_(?P<name>\w{1,5000})\Z", re.ASCII)
_STRIPE_DECLINE = re.compile(r"(?:card_)?(?:visa_)?chargeDeclined(?P<why>[A-Za-z]*)\Z", re.ASCII)
_STRIPE_AUTHENTICATION = re.compile(
    r"(?:card_)?(?:authenticationRequired|threeDSecure2?Required)\w*\Z", re.ASCII
)
_STRIPE_BANK_DEBIT = re.compile(r"(?:usBankAccount|sepaDebit|acssDebit|bacsDebit)", re.ASCII)
_STRIPE_WHY = {"": "generic_decline", "VelocityLimitExceeded": "card_velocity_exceeded"}


@dataclass(frozen=True)
class Outcome:
    """What happens when this payment method is charged; the codes are set for a decline."""

    result: Result
    decline_code: str | None = None

    @property
    def code(self) -> str:
        """Stripe's error code for this decline."""
        known = self.decline_code in CODES_OF_THEIR_OWN
        return str(self.decline_code) if known else "card_declined"


GOOD = Outcome("succeeds")
AUTHENTICATION = Outcome("needs_authentication", "authentication_required")


def exists_customer(customer_id: str) -> bool:
    """Every well-formed `cus_…` id exists but `cus_missing…`."""
    found = CUSTOMER_ID.match(customer_id)
    return bool(found) and not customer_id.startswith("cus_missing")


def exists_method(method_id: str) -> bool:
    """Every well-formed id exists but `pm_missing…`, `card_missing…`, `src_missing…`."""
    found = METHOD_ID.match(method_id)
    return found is not None and not found["name"].startswith("missing")


def default_method(customer_id: str, kind: str) -> str | None:
    """The card (`pm` or `card`) that a customer without set-up has; None for `cus_nopm…`.

    Its name carries the customer's outcome.
    """
    name = customer_id.removeprefix("cus_")
    if name.startswith("nopm"):
        return None
    if name.startswith(("decline_", "auth", "processing")):
        return f"{kind}_{name}"
    return f"{kind}_{name}_visa"


def outcome_of(method_id: str) -> Outcome:
    """What charging this payment method comes to. A pure function of its name."""
    found = METHOD_ID.match(method_id)
    name = found["name"] if found else ""
    if name.startswith("decline_"):
        return _decline(_decline_code(name.removeprefix("decline_")))
    if name.startswith("auth") or _STRIPE_AUTHENTICATION.match(name):
        return AUTHENTICATION
    if name.startswith("processing") or _STRIPE_BANK_DEBIT.match(name):
        return Outcome("processes")
    if name in {"card_chargeCustomerFail", "chargeCustomerFail"}:
        return _decline("generic_decline")
    if name in {"card_radarBlock", "radarBlock"}:
        return _decline("fraudulent")
    declined = _STRIPE_DECLINE.match(name)
    if declined:
        why = declined["why"]
        return _decline(_STRIPE_WHY.get(why) or _snake(why))
    return GOOD


def _decline(code: str) -> Outcome:
    return AUTHENTICATION if code == "authentication_required" else Outcome("declines", code)


def _decline_code(text: str) -> str:
    """`insufficient_funds_17` and `insufficient_funds` are the same decline."""
    for code in DECLINE_CODES:
        if text.startswith(code):
            return code
    return re.sub(r"[\d_]+\Z", "", text) or "generic_decline"


def _snake(text: str) -> str:
    return re.sub(r"(?<!\A)([A-Z])", r"_\1", text).lower()
