"""A whole pipeline on a ledger and queues of its own: worker, control worker, beat, bridges.

Starting one takes some seconds of a processor, so tests that follow each other share one. Each
test brings customers of its own, and leaves nothing unfinished behind; what it has killed is
started again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psycopg
import redis

from models.database import make_engine
from models.dead_letters import DeadLetter, DeadLetters
from models.errors import LedgerUnavailable
from models.keys import charge_key
from models.ledger import Ledger
from models.ledger_reads import LedgerReads
from models.records import Record
from models.settings import load_settings
from models.states import State, is_settled
from sandbox import clock, health
from sandbox.backlog import nsq_unfinished, stream_unfinished
from sandbox.processes import Processes
from sandbox.stack import create_channel, create_group
from tests.support.faults import FaultPoints
from tests.support.producers import publish_nsq, publish_redis
from tests.support.roles import Role, RoleStarter
from tests.support.services import Services
from tests.support.stripe import Stripe
from tests.support.waiting import wait_until

Event = Mapping[str, Any]

KINDS = ("worker", "worker-control", "beat", "bridge-nsq", "bridge-redis")
SLACK_S = 25.0
"""Added to every bound: the machine may be busy with other tests."""
SHORT_DELIVERIES = {
    "MSG_TIMEOUT_S": "3",
    "MIN_IDLE_S": "3",
    "TOUCH_S": "0.7",
    "REDISPATCH_AFTER_S": "2",
    "PREPARATION_S": "4",
    "LIMITS_CHECK": "warn",
}
"""A PIPELINE_ENV under which brokers deliver again while a charge still goes on.

A preparation of one second would come too late on a busy machine.
"""
PUBLISH = {"nsq": publish_nsq, "redis": publish_redis}


class Pipeline:
    """`env` adds to the settings of all roles; the limits are the fast ones."""

    def __init__(
        self,
        services: Services,
        folder: Path,
        kinds: Sequence[str] = KINDS,
        **env: str,
    ) -> None:
        services.need("postgres", "redis", "nsqd", "stripe")
        self.services = services
        self.kinds = tuple(kinds)
        self.stripe = Stripe(services.stack.url("stripe"))
        self.stripe.reset()
        self.fault_point = FaultPoints(folder / "faults")
        self.settings = {
            **services.stack.settings,
            "DATABASE_URL": services.new_database(),
            "REDIS_URL": services.new_redis_database(lasting=True),
            "CELERY_BROKER_URL": services.new_redis_database(lasting=True),
            "NSQ_TOPIC": f"billing-events-{services.number()}",
            "STRIPE_API_BASE": self.stripe.base_url,
            "FAULTS_DIR": str(self.fault_point.folder),
            **env,
        }
        create_channel(self.settings)
        create_group(self.settings)
        settings = load_settings(self.settings)
        self.limits = settings.limits
        self.engine = make_engine(settings, pool_size=4, name="test")
        self.ledger = Ledger(self.engine, settings.limits, "test")
        self.reads = LedgerReads(self.engine)
        roles_folder = folder / "roles"
        roles_folder.mkdir()
        self._starter = RoleStarter(Processes(roles_folder), roles_folder, self.settings)
        self.roles: dict[str, Role] = {}
        self._extras: list[Role] = []
        self.start(*self.kinds)

    # -- roles -------------------------------------------------------------------------------

    def start(self, *kinds: str) -> None:
        """Starts these roles side by side; returns when all are ready."""
        for kind in kinds:
            self.roles[kind] = self._starter(kind, wait=False)
        for kind in kinds:
            self.roles[kind].wait_ready()

    def kill(self, kind: str) -> None:
        """SIGKILL to the role's whole group."""
        self.roles[kind].kill()

    def extra(self, kind: str, **given: Any) -> Role:
        """One more role beside the usual ones, until the test is over (see RoleStarter)."""
        role = self._starter(kind, **given)
        self._extras.append(role)
        return role

    def mend(self) -> bool:
        """Ready for another test; False if something unfinished is left from an earlier one."""
        for file in self.fault_point.folder.iterdir():
            file.unlink(missing_ok=True)
        for role in self._extras:
            role.kill()
        self._extras.clear()
        for role in self.roles.values():
            role.thaw()
        self.start(*(kind for kind, role in self.roles.items() if not role.alive))
        if self.unfinished() > 0:
            return False
        # Repeats of what is settled, hundreds of them after some tests, would go first.
        with redis.Redis.from_url(self.settings["CELERY_BROKER_URL"]) as client:
            client.delete("charges")
        return True

    def end(self) -> None:
        self._starter.kill_all()
        self.engine.dispose()
        self.services.heal()
        self.services.drop_database(self.settings["DATABASE_URL"])
        self.services.give_back(self.settings["REDIS_URL"], self.settings["CELERY_BROKER_URL"])

    # -- what tests cause --------------------------------------------------------------------

    def publish(self, broker: str, *bodies: Event | bytes) -> None:
        """`broker`: nsq or redis."""
        for body in bodies:
            PUBLISH[broker](self.settings, body)

    def pass_time(self, seconds: float) -> None:
        """Moves the ledger's clock, then Stripe's."""
        clock.advance(self.settings["DATABASE_URL"], seconds)
        self.stripe.clock(seconds)

    # -- what they see -----------------------------------------------------------------------

    def channel(self) -> dict[str, Any]:
        return health.channel_stats(self.settings)

    def unfinished(self) -> int:
        """Deliveries that neither broker has an ack for."""
        return nsq_unfinished(self.settings) + stream_unfinished(self.settings)

    def nsq_acked(self) -> int:
        """Messages that the bridges which are connected now have finished."""
        clients = health.channel_stats(self.settings, clients=True)["clients"]
        return sum(int(client["finish_count"]) for client in clients)

    def stream_acked(self) -> int:
        """Entries of the stream that are neither pending nor still to be delivered."""
        with redis.Redis.from_url(self.settings["REDIS_URL"]) as client:
            length = int(client.xlen(self.settings["REDIS_STREAM"]))
        return length - stream_unfinished(self.settings)

    def record(self, event: Event) -> Record | None:
        """The event's record; None as well while the ledger is away."""
        try:
            return self.ledger.read(key_of(event)).record
        except LedgerUnavailable:
            return None

    def is_settled(self, *events: Event) -> bool:
        """Whether all of them are; False as well while the ledger is away."""
        keys = [key_of(event) for event in events]
        try:
            statuses = self.ledger.read_statuses(keys)
        except LedgerUnavailable:
            return False
        return all(key in statuses and is_settled(statuses[key].state) for key in keys)

    def dead_letters(self) -> list[DeadLetter]:
        return list(DeadLetters(self.engine).list(limit=1000))

    def charges(self, *events: Event) -> list[dict[str, Any]]:
        """What Stripe took for these events, found by the business identity it was told."""
        wanted = {(event["customer_id"], event["billing_period"]) for event in events}
        return [
            charge
            for charge in self.stripe.charges()
            if (charge["metadata"].get("customer_id"), charge["metadata"].get("billing_period"))
            in wanted
        ]

    def creates(self, event: Event) -> list[dict[str, Any]]:
        """The requests for this event that would take money."""
        return self.stripe.creates(charge_key=key_of(event))

    def wait_sent(self, event: Event, count: int = 1) -> None:
        """Returns when so many creates for the event have reached Stripe."""
        wait_until(lambda: len(self.creates(event)) >= count, SLACK_S, f"{count} requests")

    def logged(self, name: str, event: Event) -> bool:
        """Whether the worker that runs now has logged this about the event."""
        key = key_of(event)
        lines = self.roles["worker"].log().splitlines()
        return any(name in line and key in line for line in lines)

    # -- what must hold ----------------------------------------------------------------------

    def wait_all_settled(self, events: Sequence[Event], within_s: float) -> None:
        """Settled, and nothing left at the brokers."""
        bound_s = within_s + SLACK_S
        wait_until(lambda: self.is_settled(*events), bound_s, "all are settled")
        wait_until(self.nothing_left, bound_s, "all deliveries are acked")

    def nothing_left(self) -> bool:
        """Whether both brokers have an ack for everything."""
        return self.unfinished() == 0

    def charged_once(self, *events: Event, within_s: float = 0.0) -> None:
        """Within the bound: one charge each, of the right money, and nothing left to do."""
        self.wait_all_settled(events, within_s)
        charges = defaultdict(list)
        for charge in self.charges(*events):
            charges[charge["metadata"]["charge_key"]].append(charge)
        for event in events:
            record = self.record(event)
            assert record is not None
            assert (record.state, len(charges[key_of(event)])) == (State.CHARGED, 1), event
            (charge,) = charges[key_of(event)]
            assert charge["amount"] == event["amount_cents"] == record.amount_cents
            assert charge["currency"] == event.get("currency", "usd").lower() == record.currency
            assert charge["idempotency_key"] == key_of(event)
            assert charge["id"] == record.charge_id
        self.same_bytes()

    def same_bytes(self) -> None:
        """No two requests of one idempotency key ever differed."""
        bodies = defaultdict(set)
        for request in self.stripe.requests():
            # Without a charge key it is a test's own request, not the product's.
            if request["idempotency_key"] is not None and request["charge_key"] is not None:
                bodies[request["idempotency_key"]].add(request["body_sha256"])
        differing = {key: found for key, found in bodies.items() if len(found) != 1}
        assert differing == {}

    def moves(self, event: Event) -> Counter[str]:
        """How often the event's record made each move."""
        history = self.reads.show(event["customer_id"], event["billing_period"])
        assert history is not None
        return Counter(str(row["move"]) for row in history.events)

    def query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.settings["DATABASE_URL"]) as link:
            return link.execute(statement.encode(), values).fetchall()


def key_of(event: Event) -> str:
    return charge_key(event["customer_id"], event["billing_period"])


class SharedPipeline:
    """One pipeline for test after test, as long as they want the same settings.

    A new one is made when a test has left something undone.
    """

    def __init__(self, services: Services, folder: Path) -> None:
        self._services = services
        self._folder = folder
        self._env: Mapping[str, str] = {}
        self._current: Pipeline | None = None
        self._made = 0

    def ready(self, env: Mapping[str, str]) -> Pipeline:
        if self._current is not None and (env != self._env or not self._current.mend()):
            self.end()
        if self._current is None:
            self._made += 1
            folder = self._folder / str(self._made)
            folder.mkdir()
            self._env = env
            self._current = Pipeline(self._services, folder, **env)
        return self._current

    def end(self) -> None:
        if self._current is not None:
            self._current.end()
            self._current = None
