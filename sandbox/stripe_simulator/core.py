"""The simulator without HTTP: one exchange is a generator that pauses where time must pass.

`Simulator.handle` runs an exchange to its end in process; the server (`app`) does the waiting for
real. Driving `Simulator.exchange` by hand holds a request at any stage while others go by.

The order within a POST is Stripe's: authorization; limiters; then the idempotency key, which either
replays its saved answer, or refuses other parameters or a second request in flight; then validation
of the parameters, which saves nothing; then the claim of the key, execution, and the commit point.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path

from sandbox.stripe_simulator.admin import Admin
from sandbox.stripe_simulator.calls import Call, authorize, with_headers
from sandbox.stripe_simulator.faults import Fault, FaultList, spoiled
from sandbox.stripe_simulator.messages import Pause, Reply, Request, StripeError
from sandbox.stripe_simulator.payments import Work
from sandbox.stripe_simulator.reads import expanded, expansions
from sandbox.stripe_simulator.routes import change_for, read_for
from sandbox.stripe_simulator.rows import LoggedRequest, SavedAnswer
from sandbox.stripe_simulator.store import Store
from sandbox.stripe_simulator.world import World

FAULTS = "faults"
KEY_LIFETIME_S = 24 * 3600
MAX_KEY_LENGTH = 255
#: How many POSTs go by between two sweeps over old idempotency keys.
POSTS_PER_PRUNE = 2000

Steps = Generator[Pause, None, Reply]


def _nobody_waits() -> None:
    """In process each exchange is let go by whoever drives it."""


class Simulator:
    """Stripe's rules over one state file. One thread; `state_path` None keeps it in memory.

    `clock` gives unix seconds; POST /_sim/clock adds to it.
    """

    def __init__(
        self,
        state_path: Path | None = None,
        *,
        clock: Callable[[], float] = time.time,
        account_id: str = "acct_simulator",
    ) -> None:
        self._store = Store(state_path)
        self._world = World(self._store, clock, account_id)
        self._faults = FaultList(self._store.setting(FAULTS))
        self._in_flight: dict[str, bytes] = {}
        self._era = 0
        self._posts = 0
        self.on_release: Callable[[], None] = _nobody_waits
        self._admin = Admin(self._world, self._faults, self._save_faults, self.reset, self.release)

    def close(self) -> None:
        """Closes the state file. Exchanges that are still open must be closed before."""
        self._store.close()

    def reset(self) -> None:
        """Forgets everything: objects, keys, requests, faults, clock. Open requests come to
        nothing."""
        self._era += 1
        self._in_flight.clear()
        self._faults.clear()
        self._world.clear()

    def release(self) -> None:
        """Every pause that is going on ends, if whoever drives it has asked to be told."""
        self.on_release()

    def handle(self, request: Request, on_pause: Callable[[Pause], None] | None = None) -> Reply:
        """Runs one exchange to its end. Pauses take no time unless `on_pause` takes it."""
        steps = self.exchange(request)
        try:
            while True:
                pause = next(steps)
                if on_pause is not None:
                    on_pause(pause)
        except StopIteration as done:
            reply: Reply = done.value
            return reply

    def exchange(self, request: Request) -> Steps:
        """One exchange, step by step. Whatever it did is committed before each pause and before
        the reply; closing it early is like a server that died: an uncommitted create is gone."""
        if request.path.startswith("/_sim/"):
            reply = self._admin.answer(request)
            self._store.commit()
            return reply
        call, era = self._open(request), self._era
        steps = self._answer(call)
        try:
            while True:
                pause = next(steps)
                self._store.log(call.line)
                self._store.commit()
                yield pause
                if self._era != era:
                    return Reply(0, "", delivery="reset")
        except StopIteration as done:
            reply = done.value
        except BaseException:
            self._store.rollback()
            raise
        finally:
            steps.close()
            self._store.commit()
        line = replace(call.line, status=reply.status_sent, replayed=reply.replayed)
        self._store.log(line)
        self._store.commit()
        return with_headers(reply, call)

    def _open(self, request: Request) -> Call:
        line = LoggedRequest(
            seq=self._world.next_seq(),
            method=request.method,
            path=request.path,
            query=request.query,
            idempotency_key=request.headers.get("idempotency-key"),
            charge_key=None,
            body_sha256=hashlib.sha256(request.body).hexdigest(),
            at=self._world.now(),
        )
        return Call(request, self._world.new_id("req"), line)

    def _answer(self, call: Call) -> Steps:
        try:
            try:
                call.given = call.request.parameters()
            except ValueError as error:
                raise StripeError(400, "Invalid request: not form-encoded UTF-8") from error
            call.line = replace(call.line, charge_key=call.given.get("metadata[charge_key]"))
            authorize(call.request)
            fault = self._faults.first(call.request, call.given)
            if fault is not None and (fault.stage == "before" or call.request.method == "GET"):
                self._use(fault)
                reply = yield from self._strike(fault, None)
                if reply is not None:
                    return reply
                fault = None
            if call.request.method == "GET":
                return Reply(200, read_for(self._world, call.request.path, call.given))
            return (yield from self._change(call, fault))
        except StripeError as error:
            return Reply(error.status, error.body)

    def _change(self, call: Call, fault: Fault | None) -> Steps:
        key = call.key
        if key is not None:
            replay = self._saved(call, key)
            if replay is not None:
                return (yield from self._spoil(fault, replay))
        work = change_for(self._world, call.request, call.given, key)
        owner = call.fingerprint()
        if key is not None:
            self._in_flight[key] = owner
        claimed_at = self._world.now()
        done = False
        try:
            reply = None
            if fault is not None and fault.stage == "after_claim":
                self._use(fault)
                reply = yield from self._hold(fault, work)
                fault = None
            if reply is None:
                reply, saved = self._execute(call, work)
            else:
                saved = reply.status == 500
            if fault is not None and fault.kind == "http_500":
                self._use(fault)
                reply, fault = spoiled(fault, None), None
            if saved and key is not None:
                self._save(call, key, claimed_at, reply)
            done = True
        finally:
            if key is not None and self._in_flight.get(key) is owner:
                del self._in_flight[key]
            if not done:
                work.abandon()
        return (yield from self._spoil(fault, reply))

    def _saved(self, call: Call, key: str) -> Reply | None:
        """The replay of a key that is known. Raises StripeError for a clash."""
        if len(key) > MAX_KEY_LENGTH:
            raise StripeError(400, f"Idempotency keys have at most {MAX_KEY_LENGTH} characters.")
        fingerprint = call.fingerprint()
        answer = self._store.answer(key)
        if answer is not None and self._world.now() - answer.created >= KEY_LIFETIME_S:
            answer = None
        running = self._in_flight.get(key)
        known = answer.fingerprint if answer is not None else running
        if known is not None and known != fingerprint:
            raise StripeError(
                400,
                "Keys for idempotent requests can only be used with the same parameters they "
                "were first used with.",
                kind="idempotency_error",
            )
        if running is not None:
            raise StripeError(
                409,
                "There is currently another in-progress request using this Idempotent Key.",
                code="idempotency_key_in_use",
            )
        if answer is None:
            return None
        headers = {"Idempotent-Replayed": "true", "Original-Request": answer.request_id}
        return Reply(answer.status, answer.body, headers, replayed=True)

    def _execute(self, call: Call, work: Work) -> tuple[Reply, bool]:
        """(the reply, whether it is saved with the key)."""
        try:
            body = work.execute()
        except StripeError as error:
            return Reply(error.status, error.body), error.executed
        return Reply(200, expanded(self._world, body, expansions(call.given))), True

    def _save(self, call: Call, key: str, claimed_at: float, reply: Reply) -> None:
        answer = SavedAnswer(
            call.fingerprint(), claimed_at, reply.status, reply.body, call.request_id
        )
        self._store.save_answer(key, answer)
        self._posts += 1
        if self._posts % POSTS_PER_PRUNE == 0:
            self._store.prune_keys(self._world.now() - KEY_LIFETIME_S)

    def _hold(self, fault: Fault, work: Work) -> Generator[Pause, None, Reply | None]:
        """A fault while the key is in flight; None means that execution goes on after it.

        A timeout of a given length keeps the key in flight for all of it, whether or not the client
        stays: a hanging server does not notice.
        """
        if fault.kind == "latency":
            work.begin()
            yield Pause(fault.pause_s)
            return None
        if fault.kind == "timeout":
            work.begin()
            yield Pause(fault.pause_s, until_client_leaves=fault.seconds is None)
        work.abandon()
        if fault.kind == "timeout":
            return Reply(0, "", delivery="close")
        return spoiled(fault, None)

    def _spoil(self, fault: Fault | None, reply: Reply) -> Steps:
        """What is left to do to a finished reply; whatever was saved stays as it is."""
        if fault is None:
            return reply
        self._use(fault)
        return (yield from self._strike(fault, reply)) or reply

    def _strike(self, fault: Fault, reply: Reply | None) -> Generator[Pause, None, Reply | None]:
        """The fault's reply, or None when after a wait everything goes on as if nothing was."""
        if fault.kind == "latency":
            yield Pause(fault.pause_s)
            return None
        if fault.kind == "timeout":
            yield Pause(fault.pause_s, until_client_leaves=True)
            return Reply(0, "", delivery="close")
        return spoiled(fault, reply)

    def _use(self, fault: Fault) -> None:
        self._faults.use(fault)
        self._save_faults()

    def _save_faults(self) -> None:
        self._store.set_setting(FAULTS, self._faults.stored())
