"""The shapes of Stripe's objects, as far as charging reads them. Pure builders of dicts."""

from __future__ import annotations

from sandbox.stripe_simulator.cards import Outcome
from sandbox.stripe_simulator.messages import Json

OPEN_STATUSES = frozenset({"requires_payment_method", "requires_confirmation", "requires_action"})
CANCELABLE_STATUSES = OPEN_STATUSES | {"requires_capture"}


def payment_intent(intent_id: str, created: int, fields: Json) -> Json:
    """A new intent. `fields` are amount, currency, customer, payment_method, metadata and texts."""
    return {
        "id": intent_id,
        "object": "payment_intent",
        "amount": fields["amount"],
        "amount_capturable": 0,
        "amount_received": 0,
        "automatic_payment_methods": None,
        "canceled_at": None,
        "cancellation_reason": None,
        "capture_method": fields.get("capture_method", "automatic_async"),
        "client_secret": f"{intent_id}_secret_simulated",
        "confirmation_method": "automatic",
        "created": created,
        "currency": fields["currency"],
        "customer": fields.get("customer"),
        "description": fields.get("description"),
        "last_payment_error": None,
        "latest_charge": None,
        "livemode": False,
        "metadata": fields.get("metadata", {}),
        "next_action": None,
        "on_behalf_of": None,
        "payment_method": fields.get("payment_method"),
        "payment_method_types": ["card"],
        "processing": None,
        "receipt_email": fields.get("receipt_email"),
        "setup_future_usage": None,
        "shipping": None,
        "statement_descriptor": None,
        "statement_descriptor_suffix": fields.get("statement_descriptor_suffix"),
        "status": "requires_confirmation"
        if fields.get("payment_method")
        else "requires_payment_method",
        "transfer_group": None,
    }


def charge(charge_id: str, created: int, fields: Json) -> Json:
    """A new charge, pending until `charge_succeeds` or `charge_fails` says how it went."""
    return {
        "id": charge_id,
        "object": "charge",
        "amount": fields["amount"],
        "amount_captured": 0,
        "amount_refunded": 0,
        "balance_transaction": None,
        "captured": False,
        "created": created,
        "currency": fields["currency"],
        "customer": fields.get("customer"),
        "description": fields.get("description"),
        "disputed": False,
        "failure_code": None,
        "failure_message": None,
        "livemode": False,
        "metadata": dict(fields.get("metadata", {})),
        "outcome": None,
        "paid": False,
        "payment_intent": fields.get("payment_intent"),
        "payment_method": fields.get("payment_method"),
        "receipt_email": fields.get("receipt_email"),
        "refunded": False,
        "statement_descriptor_suffix": fields.get("statement_descriptor_suffix"),
        "status": "pending",
    }


def charge_succeeds(made: Json, *, capture: bool = True) -> None:
    """Money is taken, or only authorised when `capture` is false."""
    made["status"] = "succeeded"
    made["paid"] = True
    made["captured"] = capture
    made["amount_captured"] = made["amount"] if capture else 0
    made["outcome"] = {"network_status": "approved_by_network", "type": "authorized"}


def charge_fails(made: Json, error: Json) -> None:
    """The charge failed for the reason in a card error."""
    made["status"] = "failed"
    made["failure_code"] = error["code"]
    made["failure_message"] = error["message"]
    made["outcome"] = {
        "network_status": "declined_by_network",
        "reason": error.get("decline_code"),
        "type": "issuer_declined",
    }


def intent_succeeds(intent: Json, made: Json) -> None:
    """The intent's payment went through as the charge says, or waits to be captured."""
    intent["latest_charge"] = made["id"]
    intent["last_payment_error"] = intent["next_action"] = None
    if made["captured"]:
        intent["status"] = "succeeded"
        intent["amount_received"] = made["amount"]
    else:
        intent["status"] = "requires_capture"
        intent["amount_capturable"] = made["amount"]


def intent_fails(intent: Json, made: Json, error: Json) -> None:
    """Back to `requires_payment_method`: still open, the customer may pay it another way."""
    intent["status"] = "requires_payment_method"
    intent["latest_charge"] = made["id"]
    intent["last_payment_error"] = error
    intent["payment_method"] = None
    intent["next_action"] = None


def card_error(outcome: Outcome, charge_id: str) -> Json:
    """A decline as it stands in the envelope and in `last_payment_error`."""
    needs_customer = outcome.result == "needs_authentication"
    message = (
        "Your card was declined. This transaction requires authentication."
        if needs_customer
        else "Your card was declined."
    )
    return {
        "type": "card_error",
        "code": outcome.code,
        "decline_code": outcome.decline_code,
        "charge": charge_id,
        "message": message,
    }


def customer(customer_id: str, created: int, method: str | None, source: str | None) -> Json:
    """A customer with the payment method that invoices use and the old default source."""
    return {
        "id": customer_id,
        "object": "customer",
        "balance": 0,
        "created": created,
        "currency": None,
        "default_source": source,
        "delinquent": False,
        "description": None,
        "email": None,
        "invoice_settings": {"custom_fields": None, "default_payment_method": method},
        "livemode": False,
        "metadata": {},
        "name": None,
    }


def payment_method(method_id: str, created: int, customer_id: str | None) -> Json:
    """A stored card."""
    return {
        "id": method_id,
        "object": "payment_method",
        "billing_details": {"email": None, "name": None},
        "card": {"brand": "visa", "exp_month": 12, "exp_year": 2039, "last4": "4242"},
        "created": created,
        "customer": customer_id,
        "livemode": False,
        "metadata": {},
        "type": "card",
    }


def account(account_id: str) -> Json:
    """The account behind the key."""
    return {
        "id": account_id,
        "object": "account",
        "charges_enabled": True,
        "country": "US",
        "default_currency": "usd",
        "details_submitted": True,
        "payouts_enabled": True,
        "settings": {"dashboard": {"display_name": "Stripe simulator (chargebridge)"}},
        "type": "standard",
    }
