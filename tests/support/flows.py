"""The charge flow of a worker in this process: real PostgreSQL, the simulator over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import text

from models.events import event_from_json
from models.keys import charge_key
from models.ledger import boot_clock_s
from models.ledger_actions import LedgerActions
from models.records import Record
from models.settings import load_settings
from sandbox import clock
from tasks.charge import flow_of
from tasks.charge_flow import Order
from tasks.runtime import build_runtime
from tests.support.stripe import Stripe

RECORD_S = 5.0
PERIOD = "2026-Q3"
PATIENT = {
    "PREPARATION_S": "20",
    "CALL_S": "20",
    "SOFT_LIMIT_S": "41",
    "HARD_LIMIT_S": "42",
    "LEASE_S": "43",
    "PROOF_OF_ABSENCE_S": "60",
}
"""For those who wait for no limit: a worker that a busy machine lets stand is still in time."""


class Worker:
    """Takes steps as a worker would; the ledger's and the simulator's clocks move together."""

    def __init__(self, environment: Mapping[str, str], stripe: Stripe, **env: str) -> None:
        # A busy machine must not make a preparation of one second come too late.
        slow = {"PREPARATION_S": "4", "SOFT_LIMIT_S": "12", "HARD_LIMIT_S": "13", "LEASE_S": "14"}
        self.environment = {**environment, **slow, **env}
        self.stripe = stripe
        self.here = build_runtime(load_settings(self.environment))
        self.ledger = self.here.ledger
        self.limits = self.here.settings.limits
        self.actions = LedgerActions(self.here.engine, self.limits, "test")
        self.flow = flow_of(self.here)

    def close(self) -> None:
        self.here.engine.dispose()
        self.here.gateway.close()

    def charge(self, customer: str, **fields: Any) -> str:
        """Deliver an event of this customer; the word for what was done.

        The customer_id is the Stripe customer's id, so that a test can name the outcome.
        """
        event = event_from_json(
            {
                "customer_id": customer,
                "billing_period": PERIOD,
                "amount_cents": 2500,
                "stripe_customer_id": customer,
                **fields,
            }
        )
        key = charge_key(event.customer_id, event.billing_period)
        return self.flow.run(Order(key, event, "nsq"), boot_clock_s() + RECORD_S)

    def drive(self, customer: str, period: str = PERIOD) -> str:
        """One step from the ledger alone, as the sweep has it done."""
        key = charge_key(customer, period)
        return self.flow.run(Order(key, None, "sweep"), boot_clock_s() + RECORD_S)

    def record(self, customer: str, period: str = PERIOD) -> Record:
        return self.actions.find(customer, period)

    def recharge(self, customer: str, **given: Any) -> Record:
        """An approved recharge, committed and not yet sent."""
        record = self.record(customer)
        values = {"reason": "test", "request_id": f"{customer}-{record.attempt_epoch}", **given}
        return self.actions.recharge(record, from_epoch=record.attempt_epoch, **values).record

    def pass_time(self, seconds: float) -> None:
        clock.advance(self.environment["DATABASE_URL"], seconds)
        self.stripe.clock(seconds)

    def forget(self, customer: str, period: str = PERIOD) -> None:
        """The ledger loses a record, with all that is known of it."""
        key = charge_key(customer, period)
        with self.here.engine.connect() as connection:
            for table in ("billing_records", "charge_attempts", "ledger_events"):
                connection.execute(text(f"DELETE FROM {table} WHERE charge_key = '{key}'"))

    def charges(self, customer: str) -> list[dict[str, Any]]:
        return self.stripe.charges(customer=customer)
