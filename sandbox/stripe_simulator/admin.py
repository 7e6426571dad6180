"""The admin side, /_sim/…: what really happened, faults, the clock, and the customer's hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from sandbox.stripe_simulator import objects
from sandbox.stripe_simulator.faults import FaultList, parse_fault
from sandbox.stripe_simulator.messages import Json, Reply, Request, encode
from sandbox.stripe_simulator.rows import Stored
from sandbox.stripe_simulator.store import Kind
from sandbox.stripe_simulator.world import World

#: Lines of a long listing that are sent at a time.
LINES_PER_CHUNK = 500
MAX_ADVANCE_S = 1e9
_PAID_BY_HAND = "pm_card_visa"


class AdminError(Exception):
    """An admin request that cannot be done; the text is the answer."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Admin:
    """Answers /_sim requests. `reset` empties the simulator, `save_faults` stores the faults,
    `release` lets go of what a latency or a timeout holds."""

    def __init__(
        self,
        world: World,
        faults: FaultList,
        save_faults: Callable[[], None],
        reset: Callable[[], None],
        release: Callable[[], None],
    ) -> None:
        self._world = world
        self._faults = faults
        self._save_faults = save_faults
        self._reset = reset
        self._release = release

    def answer(self, request: Request) -> Reply:
        """The reply to one admin request; a mistake in it is a 400 or 404 with one line."""
        try:
            given = request.parameters() if request.method == "GET" else _json(request.body)
            result = self._route(request.method, request.path, given)
        except (AdminError, ValueError) as error:
            status = getattr(error, "status", 400)
            return Reply(status, encode({"error": str(error)}))
        if isinstance(result, dict):
            return Reply(200, encode(result))
        return Reply(200, "", chunks=_data(result))

    def _route(self, method: str, path: str, given: Json) -> Json | Iterator[Json]:
        match method, path:
            case "GET", "/_sim/health":
                return {"ok": True, "simulator": True}
            case "GET", "/_sim/charges":
                return _filtered(self._charges(), given)
            case "GET", "/_sim/requests":
                return _filtered(self._requests(), given)
            case "GET", "/_sim/clock":
                return self._clock()
            case "GET", "/_sim/faults":
                return {"data": self._faults.listed()}
            case "DELETE", "/_sim/faults":
                self._faults.clear()
                self._save_faults()
                return {"data": []}
            case "POST", action:
                return self._act(action.removeprefix("/_sim/"), given)
        raise AdminError("no such admin request", 404)

    def _act(self, action: str, given: Json) -> Json:
        match action:
            case "faults":
                self._faults.add(parse_fault(given))
                self._save_faults()
                return self._faults.listed()[-1]
            case "complete":
                return self._complete(given)
            case "settle":
                return self._settle(given)
            case "refund":
                return self._refund(given)
            case "dispute":
                return self._dispute(given)
            case "clock":
                advance_s = _number(given, "advance_s")
                if advance_s < 0:
                    raise AdminError("advance_s must be 0 or more: time does not go back", 400)
                self._world.advance(advance_s)
                return self._clock()
            case "release":
                self._release()
                return {"ok": True}
            case "reset":
                self._reset()
                return {"ok": True}
        raise AdminError("no such admin request", 404)

    def _clock(self) -> Json:
        return {"now": self._world.now(), "offset_s": self._world.offset_s}

    def _charges(self) -> Iterator[Json]:
        for key, charge in self._world.store.taken_charges():
            yield {
                "id": charge["id"],
                "amount": charge["amount"],
                "currency": charge["currency"],
                "customer": charge["customer"],
                "idempotency_key": key,
                "metadata": charge["metadata"],
                "created": charge["created"],
                "payment_intent": charge["payment_intent"],
                "payment_method": charge["payment_method"],
                "charge_key": charge["metadata"].get("charge_key"),
            }

    def _requests(self) -> Iterator[Json]:
        for line in self._world.store.logged():
            yield {
                "method": line.method,
                "path": line.path,
                "query": line.query,
                "idempotency_key": line.idempotency_key,
                "charge_key": line.charge_key,
                "body_sha256": line.body_sha256,
                "at": line.at,
                "status": line.status,
                "replayed": bool(line.replayed),
            }

    def _intent(self, given: Json) -> Stored:
        stored = self._world.store.get("intents", str(given.get("id")))
        if stored is None:
            raise AdminError("no such payment intent", 404)
        if stored.running:
            raise AdminError("its create is still running", 409)
        return stored

    def _complete(self, given: Json) -> Json:
        """The customer pays an open intent."""
        stored = self._intent(given)
        intent = stored.body
        if intent["status"] not in objects.OPEN_STATUSES:
            raise AdminError(f"the intent is not open: {intent['status']}")
        intent["payment_method"] = intent["payment_method"] or _PAID_BY_HAND
        now = int(self._world.now())
        charge = objects.charge(
            self._world.new_id("ch"), now, {**intent, "payment_intent": intent["id"]}
        )
        objects.charge_succeeds(charge)
        objects.intent_succeeds(intent, charge)
        self._put("charges", self._world.next_seq(), charge, stored.idempotency_key)
        self._put("intents", stored.seq, intent, stored.idempotency_key)
        return intent

    def _settle(self, given: Json) -> Json:
        """What a bank debit finally came to."""
        outcome = given.get("outcome")
        if outcome not in {"succeeded", "failed"}:
            raise AdminError("outcome is succeeded or failed")
        object_id = str(given.get("id"))
        if object_id.startswith("pi_"):
            stored = self._intent(given)
            if stored.body["status"] != "processing":
                raise AdminError(f"the intent is not processing: {stored.body['status']}")
            charge = self._charge(str(stored.body["latest_charge"]))
        else:
            charge = self._charge(object_id)
            if charge.body["status"] != "pending":
                raise AdminError(f"the charge is not pending: {charge.body['status']}")
            intent_id = charge.body["payment_intent"]
            found = self._world.store.get("intents", intent_id) if intent_id else None
            stored = found or charge
        return self._settled(stored, charge, outcome == "succeeded")

    def _settled(self, stored: Stored, charge: Stored, succeeded: bool) -> Json:
        error = {
            "type": "card_error",
            "code": "payment_intent_payment_attempt_failed",
            "decline_code": "generic_decline",
            "charge": charge.body["id"],
            "message": "The payment failed.",
        }
        if succeeded:
            objects.charge_succeeds(charge.body)
        else:
            objects.charge_fails(charge.body, error)
        self._put("charges", charge.seq, charge.body, charge.idempotency_key)
        if stored is charge:
            return charge.body
        if succeeded:
            objects.intent_succeeds(stored.body, charge.body)
        else:
            objects.intent_fails(stored.body, charge.body, error)
        self._put("intents", stored.seq, stored.body, stored.idempotency_key)
        return stored.body

    def _charge(self, object_id: str) -> Stored:
        """A charge by its own id or by its intent's."""
        if object_id.startswith("pi_"):
            intent = self._world.store.get("intents", object_id)
            object_id = str(intent.body["latest_charge"]) if intent is not None else object_id
        stored = self._world.store.get("charges", object_id)
        if stored is None:
            raise AdminError("no such charge", 404)
        return stored

    def _refund(self, given: Json) -> Json:
        stored = self._charge(str(given.get("id")))
        charge = stored.body
        if not charge["captured"]:
            raise AdminError("the charge took no money")
        left = charge["amount"] - charge["amount_refunded"]
        amount = given.get("amount", left)
        if type(amount) is not int or not 1 <= amount <= left:
            raise AdminError(f"amount is 1 to {left}")
        charge["amount_refunded"] += amount
        charge["refunded"] = charge["amount_refunded"] == charge["amount"]
        self._put("charges", stored.seq, charge, stored.idempotency_key)
        return charge

    def _dispute(self, given: Json) -> Json:
        stored = self._charge(str(given.get("id")))
        if not stored.body["captured"]:
            raise AdminError("the charge took no money")
        stored.body["disputed"] = True
        self._put("charges", stored.seq, stored.body, stored.idempotency_key)
        return stored.body

    def _put(self, kind: Kind, seq: int, body: Json, key: str | None) -> None:
        self._world.store.put(kind, seq, body, idempotency_key=key)


def _json(body: bytes) -> Json:
    if not body:
        return {}
    try:
        found = json.loads(body)
    except ValueError as error:
        raise AdminError("the body is not JSON") from error
    if not isinstance(found, dict):
        raise AdminError("the body is not a JSON object")
    return found


def _number(given: Json, name: str) -> float:
    value: Any = given.get(name)
    if type(value) not in {int, float} or not abs(value) <= MAX_ADVANCE_S:
        raise AdminError(f"{name} is a number of seconds")
    return float(value)


def _filtered(lines: Iterator[Json], given: Json) -> Iterator[Json]:
    """The lines whose fields are as the query says."""
    return (
        line for line in lines if all(str(line.get(name)) == value for name, value in given.items())
    )


def _data(lines: Iterator[Json]) -> Iterator[str]:
    """`{"data": […]}` in pieces."""
    yield '{"data":['
    piece: list[str] = []
    first = True
    for line in lines:
        piece.append(encode(line) if first else "," + encode(line))
        first = False
        if len(piece) >= LINES_PER_CHUNK:
            yield "".join(piece)
            piece.clear()
    yield "".join(piece) + "]}"
