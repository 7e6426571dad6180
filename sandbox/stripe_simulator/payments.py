"""Charging: what POST /v1/payment_intents, its cancel, and POST /v1/charges execute.

Each is a `Work`: made from checked parameters (what fails there is not saved), begun when its key
is claimed, and executed at the commit point or abandoned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from sandbox.stripe_simulator import cards, money, objects
from sandbox.stripe_simulator.faults import lock_timeout
from sandbox.stripe_simulator.messages import Json, StripeError, no_such
from sandbox.stripe_simulator.parameters import (
    CANCEL_PARAMETERS,
    charge_fields,
    check_known,
    intent_fields,
)
from sandbox.stripe_simulator.world import World

CANCELLATION_REASONS = frozenset({"abandoned", "duplicate", "fraudulent", "requested_by_customer"})


class Work(Protocol):
    """One execution of a POST."""

    def begin(self) -> None:
        """The key is claimed and execution will take time: show what a list would show."""

    def execute(self) -> Json:
        """Does it, and returns the object. Raises StripeError; `executed` ones are saved."""

    def abandon(self) -> None:
        """The request died before its commit point: nothing of it remains."""


class Plain:
    """Work with nothing to show before its commit point."""

    def __init__(self, do: Callable[[], Json]) -> None:
        self._do = do

    def begin(self) -> None:
        """Nothing to show."""

    def execute(self) -> Json:
        """Runs the function."""
        return self._do()

    def abandon(self) -> None:
        """Nothing to take back."""


class Payment:
    """What creating an intent and creating a charge share."""

    def __init__(self, world: World, fields: Json, key: str | None) -> None:
        self.world = world
        self.fields = fields
        self.key = key
        self.created = int(world.now())

    def check(self, method_param: str) -> str | None:
        """The checks of a running endpoint; returns the payment method to charge, if any.

        Only the customer's `default_source` stands in for one that was not given: the default
        payment method of `invoice_settings` is for invoices.
        """
        money.check_chargeable(self.fields["amount"], self.fields["currency"])
        method: str | None = self.fields["payment_method"]
        default = None
        if self.fields["customer"] is not None:
            default = self.world.named_customer(self.fields["customer"])["default_source"]
        if method is not None:
            self.world.check_method(method, method_param)
        return method or default

    def new_charge(self, method: str | None, intent_id: str | None) -> Json:
        """A pending charge with this payment's fields."""
        fields = {**self.fields, "payment_method": method, "payment_intent": intent_id}
        return objects.charge(self.world.new_id("ch"), self.created, fields)

    def put_charge(self, made: Json) -> None:
        """Stores a new charge."""
        self.world.store.put("charges", self.world.next_seq(), made, idempotency_key=self.key)


class CreateIntent(Payment):
    """POST /v1/payment_intents."""

    def __init__(self, world: World, given: Mapping[str, str], key: str | None) -> None:
        super().__init__(world, intent_fields(given), key)
        self.seq = world.next_seq()
        self.intent = objects.payment_intent(world.new_id("pi"), self.created, self.fields)

    def begin(self) -> None:
        """While the request runs, lists show the intent with a passing status."""
        try:
            self.check("payment_method")
        except StripeError:
            return
        self._put(running=True)

    def abandon(self) -> None:
        """The intent was never there."""
        self.world.store.drop_intent(self.seq)

    def execute(self) -> Json:
        """Takes the money, or says why not; a decline leaves its intent open in the lists."""
        try:
            method = self.check("payment_method")
        except StripeError:
            self.abandon()
            raise
        if method is not None:
            self.intent["payment_method"] = method
            self.intent["status"] = "requires_confirmation"
        if self.fields["confirm"]:
            self._confirm(method)
        self._put()
        return self.intent

    def _confirm(self, method: str | None) -> None:
        if method is None:
            self._put()
            raise StripeError(
                400,
                "You cannot confirm this PaymentIntent because it's missing a payment method.",
                code="payment_intent_unexpected_state",
                payment_intent=self.intent,
                executed=True,
            )
        outcome = cards.outcome_of(method)
        on_session = not (self.fields["off_session"] or self.fields["error_on_requires_action"])
        if outcome.result == "needs_authentication" and on_session:
            self.intent["status"] = "requires_action"
            self.intent["next_action"] = {"type": "use_stripe_sdk", "use_stripe_sdk": {}}
            return
        made = self.new_charge(method, self.intent["id"])
        if outcome.result in {"declines", "needs_authentication"}:
            self._decline(outcome, made, method)
        if outcome.result == "processes":
            self.intent["status"] = "processing"
            self.intent["latest_charge"] = made["id"]
        else:
            objects.charge_succeeds(made, capture=self.fields["capture_method"] != "manual")
            objects.intent_succeeds(self.intent, made)
        self.put_charge(made)

    def _decline(self, outcome: cards.Outcome, made: Json, method: str) -> None:
        error = objects.card_error(outcome, made["id"])
        error["payment_method"] = objects.payment_method(
            method, self.created, self.fields["customer"]
        )
        objects.charge_fails(made, error)
        objects.intent_fails(self.intent, made, error)
        self.put_charge(made)
        self._put()
        raise _refused(error, payment_intent=self.intent)

    def _put(self, *, running: bool = False) -> None:
        self.world.store.put(
            "intents", self.seq, self.intent, idempotency_key=self.key, running=running
        )


class CreateCharge(Payment):
    """POST /v1/charges: the older way, with `source` or the customer's default source."""

    def __init__(self, world: World, given: Mapping[str, str], key: str | None) -> None:
        super().__init__(world, charge_fields(given), key)

    def begin(self) -> None:
        """A charge appears with its outcome, not before."""

    def abandon(self) -> None:
        """Nothing to take back."""

    def execute(self) -> Json:
        """Takes the money, or says why not; a decline leaves a failed charge in the lists."""
        method = self.check("source")
        if method is None:
            raise StripeError(
                402,
                "Cannot charge a customer that has no active card",
                kind="card_error",
                code="missing",
                param="card",
                executed=True,
            )
        outcome = cards.outcome_of(method)
        made = self.new_charge(method, None)
        if outcome.result in {"declines", "needs_authentication"}:
            error = objects.card_error(outcome, made["id"])
            objects.charge_fails(made, error)
            self.put_charge(made)
            raise _refused(error)
        if outcome.result == "succeeds":
            objects.charge_succeeds(made, capture=self.fields["capture"])
        self.put_charge(made)
        return made


def _refused(error: Json, **more: Json) -> StripeError:
    """The 402 for a card error."""
    fields = {name: value for name, value in error.items() if name not in {"type", "message"}}
    return StripeError(402, error["message"], kind="card_error", executed=True, **fields, **more)


def cancel_intent(world: World, intent_id: str, given: Mapping[str, str]) -> Work:
    """POST /v1/payment_intents/{id}/cancel: from the open statuses only."""
    check_known(given, CANCEL_PARAMETERS)
    reason = given.get("cancellation_reason") or None
    if reason is not None and reason not in CANCELLATION_REASONS:
        raise StripeError(400, "Invalid cancellation_reason", param="cancellation_reason")

    def cancel() -> Json:
        stored = world.store.get("intents", intent_id)
        if stored is None:
            raise no_such("payment_intent", intent_id, "intent")
        if stored.running:
            raise lock_timeout()
        intent = stored.body
        if intent["status"] not in objects.CANCELABLE_STATUSES:
            raise StripeError(
                400,
                "You cannot cancel this PaymentIntent because it has a status of "
                f"{intent['status']}.",
                code="payment_intent_unexpected_state",
                payment_intent=intent,
                executed=True,
            )
        intent["status"] = "canceled"
        intent["canceled_at"] = int(world.now())
        intent["cancellation_reason"] = reason
        intent["next_action"] = None
        intent["amount_capturable"] = 0
        world.store.put("intents", stored.seq, intent, idempotency_key=stored.idempotency_key)
        return intent

    return Plain(cancel)
