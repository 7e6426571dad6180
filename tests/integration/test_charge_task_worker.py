"""The charge task in real workers: both pools, lost workers, what is refused and what is shown."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from celery.events import EventReceiver
from sqlalchemy import text
from sqlalchemy.engine import Engine

from models.events import BillingEvent
from models.keys import charge_key
from models.ledger import Ledger
from models.ledger_reads import LedgerReads
from models.settings import Settings
from models.states import State
from sandbox import binaries, roles
from sandbox.ports import free_port
from sandbox.stack import new_encryption_key
from tests.support.faults import FaultPoints
from tests.support.ledgers import event
from tests.support.roles import Role, RoleStarter
from tests.support.stripe import Stripe
from tests.support.waiting import wait_until

SETTLED_WITHIN_S = 60.0
TOLD_WITHIN_S = 30.0
START_WITHIN_S = 60.0
MARKER = "MARKER-of-an-event"
ASKED: dict[str, Any] = {"reply": True, "limit": 1, "timeout": 30}
"""How the one worker is asked."""


class Publisher:
    """Publishes as a bridge does: by name, with its arguments hidden."""

    def __init__(self, broker_url: str) -> None:
        self.app = Celery("chargebridge-test", broker=broker_url, set_as_current=False)

    def __call__(
        self, billing_event: BillingEvent, *, key: str | None = None, task_id: str | None = None
    ) -> str:
        key = key or charge_key(billing_event.customer_id, billing_event.billing_period)
        self.app.send_task(
            "tasks.charge",
            args=[key],
            kwargs={"event": billing_event.to_json(), "source": "nsq"},
            task_id=task_id or str(uuid4()),
            queue="charges",
            argsrepr=repr((key,)),
            kwargsrepr="{'source': 'nsq'}",
        )
        return key


@pytest.fixture
def publish(celery_broker_url: str) -> Iterator[Publisher]:
    publisher = Publisher(celery_broker_url)
    yield publisher
    publisher.app.close()


def wait_settled(ledger: Ledger, keys: list[str], state: State = State.CHARGED) -> None:
    def all_settled() -> bool:
        found = ledger.read_statuses(keys)
        return len(found) == len(set(keys)) and all(one.state is state for one in found.values())

    wait_until(all_settled, SETTLED_WITHIN_S, f"{len(keys)} records are {state}")


def wait_failure_logged(worker: Role, why: str) -> None:
    """Returns when Celery has said its last word on a task that failed."""
    ended = re.compile(rf"Task tasks\.charge\S+ raised .*{why}")
    wait_until(lambda: ended.search(worker.log()), TOLD_WITHIN_S, f"the failure is told: {why}")


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_many_events_several_times_each_are_one_charge_each(
    role: RoleStarter, publish: Publisher, ledger: Ledger, stripe: Stripe, pool: roles.Pool
) -> None:
    role("worker", pool=pool)
    events = [event(customer_id=f"cust_{number}") for number in range(15)]
    keys = [publish(one) for one in events * 3]
    wait_settled(ledger, keys)
    charges = stripe.charges()
    assert sorted(one["idempotency_key"] for one in charges) == sorted(set(keys))


def test_one_event_five_times_at_once_is_one_charge(
    role: RoleStarter, publish: Publisher, ledger: Ledger, stripe: Stripe
) -> None:
    role("worker")
    stripe.fault("latency", stage="after_claim", seconds=1.0)
    keys = [publish(event(), task_id="the-same-id") for _ in range(5)]
    wait_settled(ledger, keys)
    assert len(stripe.charges()) == 1
    assert len(stripe.creates()) == 1


@pytest.mark.parametrize("point", ["worker.before_claim", "worker.after_claim"])
def test_a_killed_child_is_made_good_by_the_sweep(
    role: RoleStarter,
    publish: Publisher,
    ledger: Ledger,
    stripe: Stripe,
    fault_point: FaultPoints,
    point: str,
) -> None:
    role("worker")
    role("worker-control")
    role("beat")
    fault_point(point, "kill")
    key = publish(event())
    fault_point.wait_reached(point)
    wait_settled(ledger, [key])
    assert len(stripe.charges()) == 1


def test_nothing_is_charged_under_another_key_than_the_events_own(
    role: RoleStarter, publish: Publisher, ledger: Ledger, stripe: Stripe
) -> None:
    worker = role("worker")
    publish(event(customer_id="wrong", description=MARKER), key="0" * 32)
    right = publish(event(customer_id="right"))
    wait_settled(ledger, [right])
    wait_failure_logged(worker, "key_mismatch")
    assert "alarm_key_mismatch" in worker.log()
    assert ledger.read("0" * 32).record is None
    assert len(stripe.charges()) == 1
    assert MARKER not in worker.log()


def test_what_a_bridge_has_let_in_is_charged_whatever_the_workers_own_limit(
    role: RoleStarter, publish: Publisher, ledger: Ledger
) -> None:
    """Guard: without a record nothing would ever show it, and its delivery would wait for ever."""
    worker = role("worker", MAX_AMOUNT_CENTS="100")
    publish(replace(event(), amount_cents=-1), key="0" * 32)
    wait_settled(ledger, [publish(event())])
    wait_until(lambda: "alarm_event_refused" in worker.log(), TOLD_WITHIN_S, "the refusal is told")


def test_a_revoked_charge_is_charged_all_the_same(
    role: RoleStarter, publish: Publisher, ledger: Ledger, stripe: Stripe
) -> None:
    worker = role("worker")
    key = charge_key(event().customer_id, event().billing_period)
    control = publish.app.control
    for terminate in (False, True):
        (answer,) = control.revoke(key, terminate=terminate, **ASKED) or [{}]
        (told,) = answer.values()
        assert "not revoked" in told["error"]
    publish(event(), task_id=key)
    wait_settled(ledger, [key])
    assert len(stripe.charges()) == 1
    assert "Discarding revoked" not in worker.log()


# --- what is shown -----------------------------------------------------------------------------


@contextmanager
def listening(app: Celery) -> Iterator[list[dict[str, Any]]]:
    """All task events while it lasts."""
    seen: list[dict[str, Any]] = []
    with app.connection_for_read() as connection:
        receiver = EventReceiver(connection, handlers={"*": seen.append}, app=app)
        thread = threading.Thread(target=lambda: list(receiver.consume(limit=None)), daemon=True)
        thread.start()
        wait_heard(app, seen)
        try:
            yield seen
        finally:
            receiver.should_stop = True
            thread.join(30)


def wait_heard(app: Celery, seen: list[dict[str, Any]]) -> None:
    """Returns when the listener hears: Redis gives it nothing of before its subscription."""
    with app.events.default_dispatcher() as dispatcher:

        def heard() -> bool:
            dispatcher.send("test-sound")
            return bool(seen)

        wait_until(heard, TOLD_WITHIN_S, "the listener hears")


def test_logs_and_task_events_show_keys_and_never_an_event(
    role: RoleStarter, publish: Publisher, ledger: Ledger, stripe: Stripe, settings: Settings
) -> None:
    worker = role("worker")
    told: dict[str, Any] = {
        "description": MARKER,
        "metadata": {"note": MARKER},
        "event_id": MARKER,
    }
    with listening(publish.app) as seen:
        good = publish(event(customer_id="a", **told))
        declined = publish(event(customer_id="b", stripe_customer_id="cus_decline_fraudulent_1"))
        publish(event(customer_id="c", **told), key="f" * 32)
        wait_settled(ledger, [good])
        wait_settled(ledger, [declined], State.CARD_DECLINED)
        wait_until(
            lambda: {"task-succeeded", "task-failed"} <= {one["type"] for one in seen},
            TOLD_WITHIN_S,
            "events of a success and of a failure",
        )
        wait_failure_logged(worker, "key_mismatch")
    shown = worker.log() + repr(seen)
    assert good in shown
    assert MARKER not in shown
    assert settings.stripe_api_key not in shown


# --- starts that are refused -------------------------------------------------------------------

VAULTED = {
    "VAULT_MODE": "self",
    "VAULT_URL": "http://127.0.0.1:1",
    "VAULT_ADMIN_KEY": "admin-key-of-the-tests",
    "VAULT_ENCRYPTION_KEYS": new_encryption_key(),
}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"CELERY_BROKER_URL": ""}, "CELERY_BROKER_URL is not set"),
        ({"DATABASE_URL": ""}, "DATABASE_URL is not set"),
        ({"STRIPE_API_KEY": ""}, "STRIPE_API_KEY is not set"),
        ({"VAULT_MODE": ""}, "VAULT_MODE is not set"),
        ({**VAULTED, "VAULT_URL": ""}, "VAULT_URL is not set"),
        ({**VAULTED, "VAULT_URL": "vault:8410"}, "VAULT_URL must be an http or https URL"),
        ({**VAULTED, "VAULT_ADMIN_KEY": ""}, "VAULT_ADMIN_KEY is not set"),
        ({**VAULTED, "VAULT_ENCRYPTION_KEYS": ""}, "VAULT_ENCRYPTION_KEYS is not set"),
        ({"LEASE_S": "1"}, "HARD_LIMIT_S (8) must be less than LEASE_S (1)"),
        ({"CELERY_BROKER_URL": "redis://127.0.0.1:1/0"}, "CELERY_BROKER_URL: the broker does not"),
        ({"DATABASE_URL": "postgresql://x@127.0.0.1:1/x"}, "DATABASE_URL: connection "),
        ({"DATABASE_URL": "sqlite:///x"}, "DATABASE_URL must name a PostgreSQL database"),
    ],
)
def test_a_worker_that_cannot_work_says_why_in_one_line(
    environment: dict[str, str], changes: dict[str, str], says: str
) -> None:
    code, errors = _start_worker({**environment, **changes})
    assert code == 1
    (line,) = errors.strip().splitlines()
    assert line.startswith(f"chargebridge: {says}")


def test_a_worker_of_another_namespace_or_account_does_not_start(
    environment: dict[str, str], role: RoleStarter, engine: Engine
) -> None:
    role("worker").terminate()
    for changes, says in (
        ({"CHARGE_NAMESPACE": "other"}, "CHARGE_NAMESPACE is not the one"),
        ({"STRIPE_API_KEY": "sk_live_1"}, "STRIPE_API_KEY (live or test mode) is not the one"),
    ):
        code, errors = _start_worker({**environment, **changes})
        assert (code, says in errors) == (1, True), errors
    assert not LedgerReads(engine).recovering()


@contextmanager
def role_without_rights(engine: Engine) -> Iterator[str]:
    """The database's URL for somebody who may log in and read nothing."""
    name = f"stranger_of_{engine.url.database}"
    with engine.connect() as connection:
        connection.execute(text(f"CREATE ROLE {name} LOGIN PASSWORD 'x'"))
    try:
        url = engine.url.set(drivername="postgresql", username=name, password="x")
        yield url.render_as_string(hide_password=False)
    finally:
        with engine.connect() as connection:
            connection.execute(text(f"DROP ROLE {name}"))


def test_a_worker_that_cannot_make_its_checks_does_not_start_without_them(
    environment: dict[str, str], engine: Engine
) -> None:
    """Celery logs what goes wrong in a hook of its start, and goes on."""
    with role_without_rights(engine) as url:
        code, errors = _start_worker({**environment, "DATABASE_URL": url})
    (line,) = errors.strip().splitlines()
    assert line == "chargebridge: DATABASE_URL: permission denied for table alembic_version"
    assert code == 1


def test_a_worker_starts_while_stripe_is_away(role: RoleStarter) -> None:
    worker = role("worker", STRIPE_API_BASE=f"http://127.0.0.1:{free_port()}")
    assert re.search(r"Z WARNING \S+ tasks\.deployment account_not_read", worker.log())


def _start_worker(environment: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "tasks", "worker", "-Q", "charges", "-c", "1"],
        check=False,
        capture_output=True,
        text=True,
        timeout=START_WITHIN_S,
        env={**roles.base_environment(binaries.CHECKOUT), **environment},
        cwd=binaries.CHECKOUT,
    )
    return done.returncode, done.stderr
