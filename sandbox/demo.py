"""`make demo`: the main job from end to end, with two kills on the way, and its proof.

N distinct billing events and as many repeats go to NSQ and to the stream, half of the events to
both. A worker and a bridge are killed with SIGKILL while charges are in flight, and Stripe (the
simulator) takes money a few times without its answer arriving. In the end the ledger, Stripe and
both brokers are compared.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psycopg
import redis

from sandbox import health, roles
from sandbox.backlog import nsq_unfinished, stream_unfinished
from sandbox.binaries import CHECKOUT
from sandbox.files import write_json
from sandbox.processes import SandboxError
from sandbox.stack import LocalKeeper, Stack

PERIOD = "2026-09"
BATCH = 100
LOST_ANSWERS = 3
STRIPE_LATENCY_S = 0.15
"""So that charges are in flight at the moment of a kill."""
BASE_DEADLINE_S = 90.0
DEADLINE_PER_EVENT_S = 0.25
POLL_S = 0.2
SETTLED = (
    "charged",
    "processing",
    "card_declined",
    "requires_action",
    "rejected",
    "blocked",
    "voided",
    "review",
)


@dataclass(frozen=True)
class Proof:
    """What was published and what became of it; `charged` counts distinct billing events.

    Cap, settled and held are the vault's, over all billing runs.
    """

    published: int
    distinct: int
    charged: int
    duplicate_charges: int
    missed: int
    dead_letters: int
    nsq_unfinished: int
    redis_pending: int
    ledger_total_cents: int
    stripe_total_cents: int
    cap_cents: int
    settled_cents: int
    held_cents: int
    seconds: float

    @property
    def holds(self) -> bool:
        """Once each, nothing forgotten, nothing left; all sides count the same money."""
        wrong = (
            self.duplicate_charges,
            self.missed,
            self.nsq_unfinished,
            self.redis_pending,
            self.held_cents,
        )
        totals = {self.ledger_total_cents, self.stripe_total_cents, self.settled_cents}
        return not any(wrong) and len(totals) == 1 and self.settled_cents <= self.cap_cents


def main(directory: Path, events: int, json_file: Path | None) -> int:
    """Exit code 0 when the proof holds. The last line of the output is the proof as JSON."""
    if events < 1:
        raise SandboxError("--events must be at least 1")
    if json_file is not None:
        _check_writable(json_file)
    # An orderly end, so that the roles end with us and not by our death.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with _alone(directory):
        begun = time.monotonic()
        stack = Stack(directory, limits="fast")
        if killed := stack.kill_leftovers():
            say(f"ended {killed} processes of an interrupted demo")
        stack.wipe()
        stack = Stack(directory, limits="fast")
        keeper = LocalKeeper(stack)
        say("Stripe is simulated here, and the time limits are the fast ones (LIMITS=fast)")
        try:
            proof = Demo(stack, keeper, events).run(begun)
        finally:
            keeper.processes.kill_all()
    if proof.holds:
        stack.wipe()
    else:
        say(f"the proof does not hold; logs: {stack.directory / 'logs'}")
    if json_file is not None:
        write_json(json_file, asdict(proof), mode=0o644)
    print(json.dumps(asdict(proof)), flush=True)
    return 0 if proof.holds else 1


def say(text: str) -> None:
    print(f"demo: {text}", flush=True)


def _check_writable(path: Path) -> None:
    """Refuse a file that could not be written, before anything is done. Raises SandboxError."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise SandboxError(f"{path} cannot be written")


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    directory.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    with (directory.parent / f"{directory.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SandboxError("a demo is running already") from None
        yield


@dataclass(frozen=True)
class Delivery:
    broker: str
    body: bytes


def billing_event(number: int) -> dict[str, Any]:
    """Distinct events: customers of two ways to write an id, amounts that tell them apart."""
    return {
        "customer_id": f"demo-{number:05}",
        "billing_period": PERIOD,
        "amount_cents": 500 + 7 * number,
        "stripe_customer_id": f"cus_demo{number:05}",
        "event_id": f"evt-{number}",
    }


def deliveries(events: int) -> list[Delivery]:
    """Every event twice: half of them on both brokers, the others twice on one."""
    planned = []
    for number in range(events):
        body = json.dumps(billing_event(number)).encode()
        first, other = ("nsq", "redis") if number % 2 else ("redis", "nsq")
        second = other if number % 4 < 2 else first
        planned += [Delivery(first, body), Delivery(second, body)]
    # The same order each time, so that one run can be compared with another.
    random.Random(events).shuffle(planned)  # noqa: S311 - an order, not a secret
    return planned


class Demo:
    """One run against a stack of its own."""

    def __init__(self, stack: Stack, keeper: LocalKeeper, events: int) -> None:
        self.stack = stack
        self.keeper = keeper
        self.events = events
        self.settings = stack.settings if stack.ports else {}

    def run(self, begun: float) -> Proof:
        self.stack.prepare()
        self.settings = self.stack.settings
        say("starting PostgreSQL, Redis, nsqd and the simulator")
        self.stack.bring_up(self.keeper, say)
        say(f"the stack is healthy after {time.monotonic() - begun:.1f} s")
        self._open_run()
        self._disturb_stripe()
        planned = deliveries(self.events)
        third = -(-len(planned) // 3)
        deadline = time.monotonic() + BASE_DEADLINE_S + DEADLINE_PER_EVENT_S * self.events
        self._publish(planned[:third])
        self._kill("worker", charges=self.events // 12, deadline=deadline)
        self._publish(planned[third : 2 * third])
        self._kill("bridge-nsq", charges=self.events // 4, deadline=deadline)
        self._publish(planned[2 * third :])
        self._await_end(deadline)
        return self._proof(len(planned), begun)

    # --- causing -----------------------------------------------------------------------------

    def _open_run(self) -> None:
        """The cap is a tenth above what the events come to: charging twice would pass it."""
        total = sum(billing_event(number)["amount_cents"] for number in range(self.events))
        opened = subprocess.run(
            roles.celery("run", "open", PERIOD, "--expected-total-cents", str(total)),
            env={**self.stack.place.base_environment, **self.settings},
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
            check=False,
        )
        if opened.returncode != 0:
            raise SandboxError(f"the run could not be opened: {opened.stderr.strip()[-500:]}")

    def _disturb_stripe(self) -> None:
        """The first of these with times left wins: some answers are lost, all others late."""
        lost = {"match": {}, "stage": "after_commit", "kind": "reset", "times": LOST_ANSWERS}
        late = {"match": {}, "stage": "before", "kind": "latency", "seconds": STRIPE_LATENCY_S}
        for fault in (lost, {**late, "times": 10 * self.events}):
            health.request("POST", self.stack.url("stripe", "/_sim/faults"), fault)

    def _publish(self, planned: list[Delivery]) -> None:
        nsq = [d.body for d in planned if d.broker == "nsq"]
        stream = [d.body for d in planned if d.broker == "redis"]
        for start in range(0, len(nsq), BATCH):
            publish_nsq(self.settings, nsq[start : start + BATCH])
        for start in range(0, len(stream), BATCH):
            publish_redis(self.settings, stream[start : start + BATCH])
        say(f"published {len(nsq)} messages to NSQ and {len(stream)} entries to the stream")

    def _kill(self, role: str, charges: int, deadline: float) -> None:
        """SIGKILL to the whole group once so many charges are made; then it starts again."""
        self._wait(lambda: len(self._charges()) > charges, deadline)
        self.keeper.stop_role(role, kill=True)
        say(f"killed {role} with SIGKILL after {len(self._charges())} charges")
        self.keeper.start_role(role)

    # --- watching ----------------------------------------------------------------------------

    def _await_end(self, deadline: float) -> None:
        say("waiting until everything is settled and both brokers are empty")
        ended = self._wait(self._all_ended, deadline)
        if not ended:
            say("the deadline has passed")

    def _all_ended(self) -> bool:
        return (
            self._count_settled() >= self.events
            and nsq_unfinished(self.settings) == 0
            and stream_unfinished(self.settings) == 0
            and self._budgets("held_cents") == 0
        )

    def _wait(self, condition: Callable[[], bool], deadline: float) -> bool:
        pause = threading.Event()
        while not condition():
            if time.monotonic() > deadline:
                return False
            pause.wait(POLL_S)
        return True

    def _charges(self) -> list[dict[str, Any]]:
        data: list[dict[str, Any]] = health.get_json(self.stack.url("stripe", "/_sim/charges"))[
            "data"
        ]
        return data

    def _query(self, query: str, *values: Any) -> int:
        with psycopg.connect(self.settings["DATABASE_URL"]) as link:
            row = link.execute(query.encode(), values).fetchone()
        assert row is not None
        return int(row[0])

    def _budgets(self, column: str) -> int:
        return self._query(f"SELECT coalesce(sum({column}), 0) FROM billing_runs")  # noqa: S608

    def _count_settled(self) -> int:
        query = "SELECT count(*) FROM billing_records WHERE state = ANY(%s)"
        return self._query(query, list(SETTLED))

    # --- comparing ---------------------------------------------------------------------------

    def _proof(self, published: int, begun: float) -> Proof:
        """Compares by the business identity that Stripe was told, not by keys of ours."""
        charges = self._charges()
        identity = ("customer_id", "billing_period")
        made = Counter(tuple(c["metadata"].get(n) for n in identity) for c in charges)
        wanted = {tuple(billing_event(n)[name] for name in identity) for n in range(self.events)}
        total = "SELECT coalesce(sum(amount_cents), 0) FROM billing_records WHERE state = 'charged'"
        return Proof(
            published=published,
            distinct=len(wanted),
            charged=len(wanted & made.keys()),
            duplicate_charges=sum(made.values()) - len(made),
            missed=len(wanted - made.keys()),
            dead_letters=self._query("SELECT count(*) FROM dead_letters"),
            nsq_unfinished=nsq_unfinished(self.settings),
            redis_pending=stream_unfinished(self.settings),
            ledger_total_cents=self._query(total),
            stripe_total_cents=sum(int(c["amount"]) for c in charges),
            cap_cents=self._budgets("cap_cents"),
            settled_cents=self._budgets("settled_cents"),
            held_cents=self._budgets("held_cents"),
            seconds=round(time.monotonic() - begun, 1),
        )


def publish_nsq(settings: dict[str, str], bodies: list[bytes]) -> None:
    """All of them or none (binary mpub)."""
    framed = b"".join(len(body).to_bytes(4) + body for body in bodies)
    url = f"http://{settings['NSQD_HTTP_ADDRESS']}/mpub?topic={settings['NSQ_TOPIC']}&binary=true"
    reply = health.http.request("POST", url, body=len(bodies).to_bytes(4) + framed)
    if reply.status != 200:
        raise SandboxError(f"nsqd refused {len(bodies)} messages with {reply.status}")


def publish_redis(settings: dict[str, str], bodies: list[bytes]) -> None:
    with redis.Redis.from_url(settings["REDIS_URL"]) as client:
        pipeline = client.pipeline(transaction=False)
        for body in bodies:
            pipeline.xadd(settings["REDIS_STREAM"], {"payload": body})
        pipeline.execute()
