"""What a worker must know before it claims: how the customer pays."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.events import BillingEvent
    from tasks.stripe_gateway import StripeGateway


def payment_method_for(
    event: BillingEvent, gateway: StripeGateway, deadline_s: float
) -> str | None:
    """The payment method to send, by the event or by the customer's own default.

    Stripe itself would fall back to `default_source` only. None for a customer who has no
    method or does not exist: the request goes out without one, and what Stripe answers to it
    is the outcome. Raises StripeUnavailable.
    """
    if event.payment_method is not None:
        return event.payment_method
    return gateway.customer(event.stripe_customer_id, deadline_s).default_method
