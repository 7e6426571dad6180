"""One charge after the other through the flow: real ledger, simulated Stripe, no Celery."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy.engine import Engine

from models.events import BillingEvent
from models.keys import charge_key
from models.ledger import Ledger, boot_clock_s
from models.ledger_reads import LedgerReads
from models.records import Record, StoredRequest
from models.settings import load_settings
from models.states import State
from sandbox import clock
from tasks.cancel_earlier import EarlierObjects
from tasks.charge_flow import ChargeFlow, Order
from tasks.look_up import LookUp
from tasks.requests import build_request
from tasks.stripe_gateway import StripeGateway
from tests.support.ledgers import event, new_record
from tests.support.stripe import Stripe

KEY = "sk_test_flow"
TASK_S = 6.0
LIMITS = {"LIMITS": "fast", "PREPARATION_S": "20", "LIMITS_CHECK": "warn"}
"""On a busy machine a preparation of one second would come too late."""


class Driver:
    """Takes steps for billing records, and lets time pass."""

    def __init__(self, engine: Engine, ledger: Ledger, stripe: Stripe, database_url: str) -> None:
        self.engine = engine
        self.ledger = ledger
        self.stripe = stripe
        self.database_url = database_url
        self.gateways: list[StripeGateway] = []
        clock.install(database_url)

    def flow(self, *, key: str = KEY, base: str | None = None, **env: str) -> ChargeFlow:
        settings = load_settings({**LIMITS, **env})
        gateway = StripeGateway(key, base or self.stripe.base_url)
        self.gateways.append(gateway)
        reads = LedgerReads(self.engine)
        look_up = LookUp(self.ledger, reads, gateway, self.ledger.limits, draw=lambda: 0.0)
        earlier = EarlierObjects(self.ledger, reads, gateway)
        return ChargeFlow(self.ledger, gateway, settings, look_up, earlier, draw=lambda: 0.0)

    def step(self, billing_event: BillingEvent | None, flow: ChargeFlow | None = None) -> str:
        """One task for this event."""
        assert billing_event is not None
        key = key_of(billing_event)
        return (flow or self.flow()).run(Order(key, billing_event, "nsq"), boot_clock_s() + TASK_S)

    def resume(self, billing_event: BillingEvent, flow: ChargeFlow | None = None) -> str:
        """One task from the ledger alone, as the sweep would start it."""
        order = Order(key_of(billing_event), None, "sweep")
        return (flow or self.flow()).run(order, boot_clock_s() + TASK_S)

    def pass_time(self, seconds: float) -> None:
        clock.advance(self.database_url, seconds)
        self.stripe.clock(seconds)

    def record(self, billing_event: BillingEvent) -> Record:
        found = self.ledger.read(key_of(billing_event)).record
        assert found is not None
        return found

    def step_unheard(
        self, stage: str, flow: ChargeFlow | None = None, **fields: Any
    ) -> BillingEvent:
        """A new event whose charge is sent and whose reply nobody hears.

        With the stage "after_commit" the money is taken, with "before" it is not.
        """
        billing_event = event(**fields)
        self.stripe.fault("reset", stage=stage)
        assert self.step(billing_event, flow) == State.SENT
        return billing_event

    def claim_elsewhere(self, billing_event: BillingEvent, key_id: str = "k") -> StoredRequest:
        """Another worker claims this new event, and is not heard of again; its request."""
        new = new_record(billing_event)
        request = build_request(
            billing_event,
            new.charge_key,
            epoch=0,
            payment_method=None,
            key_id=key_id,
            namespace="stripe-billing",
        )
        assert self.ledger.claim_new(new, request, None) is not None
        return request


@pytest.fixture
def driver(engine: Engine, ledger: Ledger, stripe: Stripe, database_url: str) -> Iterator[Driver]:
    driver = Driver(engine, ledger, stripe, database_url)
    yield driver
    for gateway in driver.gateways:
        gateway.close()


def key_of(billing_event: BillingEvent) -> str:
    return charge_key(billing_event.customer_id, billing_event.billing_period)


def alarms(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.message.startswith("alarm_")]
