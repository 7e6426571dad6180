"""Which endpoint a /v1 path is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from sandbox.stripe_simulator import objects, reads
from sandbox.stripe_simulator.messages import Request, StripeError, encode
from sandbox.stripe_simulator.payments import CreateCharge, CreateIntent, Work, cancel_intent
from sandbox.stripe_simulator.world import World


def read_for(world: World, path: str, given: Mapping[str, str]) -> str:
    """The body of a GET. Raises StripeError."""
    match path.strip("/").split("/")[1:]:
        case ["payment_intents"]:
            return reads.listing(world, "intents", given)
        case ["payment_intents", intent_id]:
            return reads.retrieve(world, "intents", intent_id, given)
        case ["charges"]:
            return reads.listing(world, "charges", given)
        case ["charges", charge_id]:
            return reads.retrieve(world, "charges", charge_id, given)
        case ["account"]:
            return encode(objects.account(world.account_id))
        case rest:
            return _read_customer(world, rest, given) or _unknown("GET", path)


def _read_customer(world: World, parts: list[str], given: Mapping[str, str]) -> str | None:
    """Customers and their payment methods; None when the path is neither."""
    match parts:
        case ["customers"]:
            return reads.list_customers(world, given)
        case ["customers", customer_id]:
            return encode(world.customer(customer_id))
        case ["customers", customer_id, "payment_methods"]:
            return reads.customer_methods(world, customer_id)
        case ["payment_methods"] if given.get("customer"):
            return reads.customer_methods(world, given["customer"])
        case ["payment_methods", method_id]:
            return reads.retrieve_method(method_id)
    return None


def change_for(world: World, request: Request, given: Mapping[str, str], key: str | None) -> Work:
    """The work of a POST or DELETE, its parameters checked. Raises StripeError."""
    match [request.method, *request.path.strip("/").split("/")[1:]]:
        case ["POST", "payment_intents"]:
            return CreateIntent(world, given, key)
        case ["POST", "payment_intents", intent_id, "cancel"]:
            return cancel_intent(world, intent_id, given)
        case ["POST", "charges"]:
            return CreateCharge(world, given, key)
        case ["POST", "customers"]:
            return reads.write_customer(world, None, given)
        case ["POST", "customers", customer_id]:
            return reads.write_customer(world, customer_id, given)
        case ["DELETE", "customers", customer_id]:
            return reads.delete_customer(world, customer_id)
        case _:
            return _unknown(request.method, request.path)


def _unknown(method: str, path: str) -> NoReturn:
    raise StripeError(404, f"Unrecognized request URL ({method}: {path[:200]}).")
