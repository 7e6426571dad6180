"""What every endpoint needs: the store, the settable clock, fresh ids, and who exists."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from sandbox.stripe_simulator import cards, objects
from sandbox.stripe_simulator.messages import Json, StripeError, no_such
from sandbox.stripe_simulator.store import Store

CLOCK_OFFSET = "clock_offset_s"
#: Implicit customers and payment methods say they were made at this moment.
LONG_AGO = 1_700_000_000


class World:
    """The simulator's state and clock. `clock` gives unix seconds; the offset comes on top."""

    def __init__(self, store: Store, clock: Callable[[], float], account_id: str) -> None:
        self.store = store
        self.account_id = account_id
        self._clock = clock
        self._seq = store.last_seq()
        self.offset_s = float(store.setting(CLOCK_OFFSET) or 0.0)

    def now(self) -> float:
        """The simulator's time, unix seconds."""
        return self._clock() + self.offset_s

    def advance(self, seconds: float) -> None:
        """Moves the clock; the offset survives a restart."""
        self.offset_s += seconds
        self.store.set_setting(CLOCK_OFFSET, self.offset_s)

    def next_seq(self) -> int:
        """The next number; it orders objects made in the same second."""
        self._seq += 1
        return self._seq

    @staticmethod
    def new_id(prefix: str) -> str:
        """A fresh id; random, so that an id rolled back by a kill never comes again."""
        return f"{prefix}_sim{secrets.token_hex(10)}"

    def clear(self) -> None:
        """Empties the store and sets the clock back. Numbers go on, so that nothing collides."""
        self.store.clear()
        self.offset_s = 0.0

    def customer(self, customer_id: str) -> Json:
        """A customer as it is now; a deleted one as `{id, object, deleted}`.

        Raises StripeError `resource_missing` (404).
        """
        stored = self.store.customer(customer_id)
        if stored is not None:
            deleted, body = stored
            if deleted:
                return {"id": customer_id, "object": "customer", "deleted": True}
            return body
        if not cards.exists_customer(customer_id):
            raise no_such("customer", customer_id, "id")
        method = cards.default_method(customer_id, "pm")
        return objects.customer(
            customer_id, LONG_AGO, method, cards.default_method(customer_id, "card")
        )

    def named_customer(self, customer_id: str, *, deleted_too: bool = False) -> Json:
        """A customer named by a parameter. Raises StripeError `resource_missing` (400).

        What a deleted customer was charged can still be listed (`deleted_too`).
        """
        missing = no_such("customer", customer_id, "customer", status=400)
        try:
            found = self.customer(customer_id)
        except StripeError as error:
            raise missing from error
        if found.get("deleted") and not deleted_too:
            raise missing
        return found

    @staticmethod
    def check_method(method_id: str, param: str) -> None:
        """Raises StripeError `resource_missing` (400) for a payment method that is not there."""
        if not cards.exists_method(method_id):
            what = "PaymentMethod" if method_id.startswith("pm_") else "source"
            raise no_such(what, method_id, param, status=400)
