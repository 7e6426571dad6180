"""A real ledger and the simulator's core in one process, with a hand on every step between them.

A step can be made to die before or after any of its statements, or anywhere in its call to
Stripe; replies get lost; requests hang at Stripe while the world goes on; another worker overtakes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import psycopg
import stripe
from sqlalchemy import event as sqlalchemy_event
from sqlalchemy import text
from sqlalchemy.engine import Engine

from models.errors import ChargebridgeError
from models.events import BillingEvent
from models.keys import charge_key
from models.ledger import Ledger, boot_clock_s
from models.ledger_actions import LedgerActions
from models.ledger_reads import LedgerReads
from models.records import Record
from models.settings import load_settings
from sandbox.stripe_simulator.core import Simulator, Steps
from sandbox.stripe_simulator.messages import Reply, Request
from tasks import deadline_http
from tasks.cancel_earlier import EarlierObjects
from tasks.charge_flow import ChargeFlow, Order
from tasks.errors import OutcomeNotRecorded
from tasks.look_up import LookUp
from tasks.manual import Manual
from tasks.polling import Polling
from tasks.recharge_flow import Recharges
from tasks.stripe_gateway import StripeGateway
from tests.support.ledgers import event

CREATES = ("/v1/payment_intents", "/v1/charges")
BASE = "http://simulator"
KEYS = ("sk_test_first", "sk_test_second")
APIS = ("payment_intents", "charges")
HANGS_FOR_S = 20.0
"""No request runs longer than this at Stripe: less than the proof of absence."""
OVERTAKEN_S = 10.0
"""Longer than a lease."""


class Crash(BaseException):
    """The worker's process is gone."""


@dataclass
class Trick:
    """What goes wrong in one step: at which statement, or in the call to Stripe."""

    statement: int = 0
    """The n-th statement of the step; 0: none."""
    at_statement: str = ""
    """crash_before, crash_after, refused, lost."""
    call: str = ""
    """See `World.exchange`."""
    stage: str = "after_claim"


class InProcess(stripe.HTTPClient):
    """Hands the library's requests to the world."""

    name = "in-process"

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def request(
        self, method: str, url: str, headers: Any, post_data: Any = None, **_: Any
    ) -> tuple[bytes, int, Mapping[str, str]]:
        call = deadline_http.current_call()
        call.begin_to_write()
        parts = urlsplit(url)
        sent = {name.lower(): str(value) for name, value in (headers or {}).items()}
        # Whether two API keys of one account share their idempotency keys is not promised.
        sent["idempotency-key"] = f"{sent['authorization']}{sent.get('idempotency-key')}"
        request = Request(
            method=method.upper(),
            path=parts.path,
            query=parts.query,
            headers=sent,
            body=call.body if call.body is not None else (post_data or b""),
        )
        return self._world.exchange(request)

    def close(self) -> None:
        """Nothing is kept open."""


class World:
    """One example's world. `engine` is emptied; the ledger's clock begins at the real time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.simulator = Simulator()
        self.trick = Trick()
        self.statements = 0
        self.offset_s = 0.0
        self.hanging: list[tuple[float, Steps]] = []
        self.paid_by_hand: set[str] = set()
        self.settings = load_settings({"LIMITS": "fast"})
        self.ledger = Ledger(engine, self.settings.limits, "worker")
        self.reads = LedgerReads(engine)
        self.actions = LedgerActions(engine, self.settings.limits, "operator")
        self.recharges = Recharges(self.actions, self.reads, lambda _: True)
        self.gateways = [StripeGateway(key, BASE, http=InProcess(self)) for key in KEYS]
        self.flows = {
            (key, api): self._flow(gateway, api)
            for key, gateway in zip(KEYS, self.gateways, strict=True)
            for api in APIS
        }
        self._empty()
        sqlalchemy_event.listen(engine, "before_cursor_execute", self._before)
        sqlalchemy_event.listen(engine, "after_cursor_execute", self._after)

    def close(self) -> None:
        sqlalchemy_event.remove(self.engine, "before_cursor_execute", self._before)
        sqlalchemy_event.remove(self.engine, "after_cursor_execute", self._after)
        for _, steps in self.hanging:
            steps.close()
        self.simulator.close()

    def _flow(self, gateway: StripeGateway, api: str) -> ChargeFlow:
        limits = self.settings.limits
        look_up = LookUp(self.ledger, self.reads, gateway, limits, draw=lambda: 0.5)
        earlier = EarlierObjects(self.ledger, self.reads, gateway)
        settings = load_settings({"LIMITS": "fast", "STRIPE_CHARGE_API": api})
        return ChargeFlow(self.ledger, gateway, settings, look_up, earlier, draw=lambda: 0.5)

    def _empty(self) -> None:
        with self.engine.connect() as connection:
            connection.execute(text("TRUNCATE billing_records, charge_attempts, ledger_events"))
            connection.execute(text("UPDATE sandbox_clock SET offset_s = 0"))

    # -- steps -------------------------------------------------------------------------------

    def work(
        self,
        key: str,
        billing_event: BillingEvent | None,
        trick: Trick,
        key_name: str = KEYS[0],
        api: str = APIS[0],
    ) -> str:
        """One worker's task; whatever it dies of or is told."""
        return self.step(
            trick,
            lambda: self.flows[key_name, api].run(Order(key, billing_event, "nsq"), boot_clock_s()),
        )

    def step(self, trick: Trick, act: Any) -> str:
        """Run something with a trick armed."""
        self.trick, self.statements = trick, 0
        try:
            return str(act())
        except Crash:
            return "crash"
        except (ChargebridgeError, OutcomeNotRecorded) as error:
            return f"told: {error}"
        finally:
            self.trick = Trick()

    def sweep(self, trick: Trick) -> None:
        """Drive all that is due, one after the other; the trick is the first one's."""
        after = ""
        while keys := self.ledger.dispatch_due(after, 50):
            for key in keys:
                self.work(key, None, trick)
                trick = Trick()
            after = keys[-1]

    def poll(self, trick: Trick) -> None:
        self.step(trick, Polling(self.actions, self.gateways[0]).run_once)

    @property
    def manual(self) -> Manual:
        namespace = self.settings.charge_namespace
        return Manual(self.actions, self.ledger, self.reads, self.gateways[0], namespace)

    # -- time --------------------------------------------------------------------------------

    def pass_time(self, seconds: float) -> None:
        """The ledger's clock first, then Stripe's. No request runs on for ever meanwhile."""
        self.offset_s += seconds
        for begun_s, steps in list(self.hanging):
            if self.offset_s - begun_s > HANGS_FOR_S:
                self.hanging.remove((begun_s, steps))
                self._finish(steps)
        with self.engine.connect() as connection:
            moved = text("UPDATE sandbox_clock SET offset_s = :offset_s")
            connection.execute(moved, {"offset_s": self.offset_s})
        self.admin("POST", "clock", {"advance_s": seconds})

    def end_hanging(self, *, finish: bool) -> None:
        """Requests that hang at Stripe are done there at last, or come to nothing."""
        for _, steps in self.hanging:
            if finish:
                self._finish(steps)
            else:
                steps.close()
        self.hanging.clear()

    @staticmethod
    def _finish(steps: Steps) -> None:
        for _ in steps:
            pass

    # -- Stripe ------------------------------------------------------------------------------

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        raw = b"" if body is None else json.dumps(body).encode()
        return self.simulator.handle(Request(method, f"/_sim/{path}", body=raw)).json()

    def successes(self) -> dict[str, list[dict[str, Any]]]:
        """Charges that took money, by charge key."""
        found: dict[str, list[dict[str, Any]]] = {}
        for charge in self.admin("GET", "charges")["data"]:
            found.setdefault(charge["charge_key"], []).append(charge)
        return found

    def exchange(self, request: Request) -> tuple[bytes, int, Mapping[str, str]]:
        """One request to Stripe, with what the step's trick does to a create."""
        trick = self.trick.call if request.path in CREATES and request.method == "POST" else ""
        self.trick.call = "" if trick else self.trick.call
        key = request.headers.get("idempotency-key", "")
        if trick == "crash_before":
            raise Crash
        if trick == "lost_before":
            raise ConnectionResetError
        if trick in ("hang", "hang_crash"):
            self._hang(request, key, crash=trick == "hang_crash")
        if trick == "overtaken_before":
            self._overtake(request)
        if trick.startswith("reply_"):
            self._fault(key, trick.removeprefix("reply_"))
        reply = self.simulator.handle(request)
        if trick == "crash_after":
            raise Crash
        if trick == "lost_after" or reply.delivery != "whole":
            raise ConnectionResetError
        if trick == "overtaken_after":
            self._overtake(request)
        return _http(reply)

    def _fault(self, key: str, kind: str) -> None:
        match = {"idempotency_key": key}
        fault = {"match": match, "stage": self.trick.stage, "kind": kind, "times": 1}
        self.admin("POST", "faults", fault)

    def _hang(self, request: Request, key: str, *, crash: bool) -> None:
        """The request stands still at Stripe; its worker gives up or is gone."""
        self._fault(key, "latency")
        steps = self.simulator.exchange(request)
        if next(steps, None) is not None:
            self.hanging.append((self.offset_s, steps))
        if crash:
            raise Crash
        raise TimeoutError

    def _overtake(self, request: Request) -> None:
        """The lease runs out while the request is on its way, and another worker acts."""
        key = request.parameters()["metadata[charge_key]"]
        trick, statements = self.trick, self.statements
        self.pass_time(OVERTAKEN_S)
        self.work(key, None, Trick())
        self.trick, self.statements = trick, statements

    # -- PostgreSQL --------------------------------------------------------------------------

    def _before(self, *_: Any) -> None:
        self.statements += 1
        if self.statements == self.trick.statement:
            if self.trick.at_statement == "crash_before":
                raise Crash
            if self.trick.at_statement == "refused":
                raise psycopg.OperationalError("refused")

    def _after(self, *_: Any) -> None:
        if self.statements == self.trick.statement:
            if self.trick.at_statement == "crash_after":
                raise Crash
            if self.trick.at_statement == "lost":
                raise psycopg.OperationalError("lost")

    # -- the ledger --------------------------------------------------------------------------

    def records(self) -> dict[str, Record]:
        return {record.charge_key: record for record in self.reads.list(limit=1000)}


def _http(reply: Reply) -> tuple[bytes, int, Mapping[str, str]]:
    return reply.body.encode(), reply.status, reply.headers


def event_of(customer: str) -> tuple[str, BillingEvent]:
    """(charge key, the one event) of a customer."""
    billing_event = event(customer, "2026-Q3", stripe_customer_id=customer)
    return charge_key(customer, "2026-Q3"), billing_event
