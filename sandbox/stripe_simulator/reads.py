"""Retrieving and listing: consistent at once, newest first; and customers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sandbox.stripe_simulator import cards, objects
from sandbox.stripe_simulator.messages import Json, encode, no_such
from sandbox.stripe_simulator.parameters import (
    CHARGE_LIST_PARAMETERS,
    CUSTOMER_PARAMETERS,
    LIST_PARAMETERS,
    RETRIEVE_PARAMETERS,
    check_known,
    created_bounds,
    metadata_of,
    page_size,
)
from sandbox.stripe_simulator.payments import Plain, Work
from sandbox.stripe_simulator.store import Kind
from sandbox.stripe_simulator.world import LONG_AGO, World

NAMES = {"intents": "payment_intent", "charges": "charge"}
PATHS = {"intents": "/v1/payment_intents", "charges": "/v1/charges"}
_CUSTOMER_TEXTS = ("description", "email", "name")


def retrieve(world: World, kind: Kind, object_id: str, given: Mapping[str, str]) -> str:
    """One intent or charge, as text. Raises StripeError `resource_missing`."""
    check_known(given, RETRIEVE_PARAMETERS)
    stored = world.store.get(kind, object_id)
    if stored is None:
        raise no_such(NAMES[kind], object_id, "intent" if kind == "intents" else "id")
    return expanded(world, stored.body, expansions(given))


def listing(world: World, kind: Kind, given: Mapping[str, str]) -> str:
    """A page of intents or charges, newest first, as text."""
    check_known(given, CHARGE_LIST_PARAMETERS if kind == "charges" else LIST_PARAMETERS)
    limit = page_size(given)
    filters: list[tuple[str, str, Any]] = [
        ("created", comparison, moment) for comparison, moment in created_bounds(given)
    ]
    if given.get("customer"):
        world.named_customer(given["customer"], deleted_too=True)
        filters.insert(0, ("customer", "=", given["customer"]))
    if given.get("payment_intent"):
        filters.insert(0, ("intent", "=", given["payment_intent"]))
    bodies, has_more = world.store.page(
        kind,
        filters,
        after=_cursor(world, kind, given, "starting_after"),
        before=_cursor(world, kind, given, "ending_before"),
        limit=limit,
    )
    inner = {name.removeprefix("data.") for name in expansions(given) if name.startswith("data.")}
    if inner:
        bodies = [expanded(world, json.loads(body), inner) for body in bodies]
    return page(bodies, PATHS[kind], has_more=has_more)


def page(bodies: list[str], url: str, *, has_more: bool = False) -> str:
    """Stripe's list object around bodies that are text already."""
    more = "true" if has_more else "false"
    data = ",".join(bodies)
    return f'{{"object":"list","url":"{url}","has_more":{more},"data":[{data}]}}'


def expansions(given: Mapping[str, str]) -> set[str]:
    """The names asked for with expand[]."""
    return {value for name, value in given.items() if name.partition("[")[0] == "expand"}


def expanded(world: World, body: Json, names: set[str]) -> str:
    """The object as text, with the ids named by `names` replaced by their objects."""
    if names:
        body = dict(body)
        for name in names & {"latest_charge", "customer", "payment_method", "payment_intent"}:
            if isinstance(body.get(name), str):
                body[name] = _fetch(world, name, body[name], body.get("customer"))
    return encode(body)


def _fetch(world: World, name: str, object_id: str, customer_id: str | None) -> Any:
    if name == "customer":
        return world.customer(object_id)
    if name == "payment_method":
        return objects.payment_method(object_id, LONG_AGO, customer_id)
    stored = world.store.get("charges" if name == "latest_charge" else "intents", object_id)
    return object_id if stored is None else stored.body


def _cursor(
    world: World, kind: Kind, given: Mapping[str, str], param: str
) -> tuple[int, int] | None:
    object_id = given.get(param)
    if not object_id:
        return None
    stored = world.store.get(kind, object_id)
    if stored is None:
        raise no_such(NAMES[kind], object_id, param, status=400)
    return int(stored.body["created"]), stored.seq


def customer_methods(world: World, customer_id: str) -> str:
    """The customer's payment methods: the default one, if there is any."""
    found = world.named_customer(customer_id)
    method = found["invoice_settings"]["default_payment_method"]
    bodies = (
        [encode(objects.payment_method(method, LONG_AGO, customer_id))]
        if method is not None
        else []
    )
    return page(bodies, f"/v1/customers/{customer_id}/payment_methods")


def retrieve_method(method_id: str) -> str:
    """A payment method. Raises StripeError `resource_missing`."""
    if not cards.exists_method(method_id):
        raise no_such("PaymentMethod", method_id, "payment_method")
    return encode(objects.payment_method(method_id, LONG_AGO, None))


def write_customer(world: World, customer_id: str | None, given: Mapping[str, str]) -> Work:
    """POST /v1/customers and POST /v1/customers/{id}.

    A new customer has a good card, as every customer here, unless the request names its cards.
    """
    check_known(given, CUSTOMER_PARAMETERS)
    metadata = metadata_of(given)
    method_name = "invoice_settings[default_payment_method]"
    source_name = "source" if given.get("source") else "default_source"

    def write() -> Json:
        for name in (method_name, source_name):
            if given.get(name):
                world.check_method(given[name], name)
        if customer_id is None:
            new = World.new_id("cus")
            bare = method_name in given or source_name in given
            body = objects.customer(
                new,
                int(world.now()),
                None if bare else cards.default_method(new, "pm"),
                None if bare else cards.default_method(new, "card"),
            )
        else:
            body = world.customer(customer_id)
            if body.get("deleted"):
                raise no_such("customer", customer_id, "id")
        for name in _CUSTOMER_TEXTS:
            if name in given:
                body[name] = given[name] or None
        if method_name in given:
            body["invoice_settings"]["default_payment_method"] = given[method_name] or None
        if source_name in given:
            body["default_source"] = given[source_name] or None
        body["metadata"].update(metadata)
        world.store.put_customer(body)
        return body

    return Plain(write)


def delete_customer(world: World, customer_id: str) -> Work:
    """DELETE /v1/customers/{id}: the customer is gone for charging, reads say `deleted`."""

    def delete() -> Json:
        body = world.customer(customer_id)
        if body.get("deleted"):
            raise no_such("customer", customer_id, "id")
        world.store.put_customer(body, deleted=True)
        return {"id": customer_id, "object": "customer", "deleted": True}

    return Plain(delete)


def list_customers(world: World, given: Mapping[str, str]) -> str:
    """The customers that were created or changed; the implicit ones have no list."""
    check_known(given, LIST_PARAMETERS | {"email"})
    limit = page_size(given)
    found = world.store.customers(limit + 1)
    bodies = [encode(body) for body in found[:limit]]
    return page(bodies, "/v1/customers", has_more=len(found) > limit)
