"""Flower against real workers: what it refuses, and that it never holds what it must not show."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from uuid import uuid4

import pytest
import redis as redis_client
import urllib3
from celery import Celery

from models.keys import charge_key
from models.ledger import Ledger
from models.states import State
from sandbox import binaries, roles
from sandbox.ports import free_port
from tests.support.faults import FaultPoints
from tests.support.ledgers import event
from tests.support.roles import Role, RoleStarter
from tests.support.stripe import Stripe
from tests.support.waiting import wait_until

MARKER = "MARKER-of-an-event"
CREDENTIALS = "somebody:a long password"
WITHIN_S = 40.0
HELD_LONG = {
    "SOFT_LIMIT_S": "60",
    "HARD_LIMIT_S": "61",
    "LEASE_S": "62",
    "PROOF_OF_ABSENCE_S": "80",
    "PREPARATION_S": "20",
}
"""Of a worker whose task is held while the test looks around."""


@dataclass
class Browser:
    """Somebody with (or without) credentials in front of Flower."""

    url: str
    credentials: str | None = CREDENTIALS

    def __call__(self, path: str, method: str = "GET", body: object = None) -> tuple[int, str]:
        headers = {"Content-Type": "application/json"}
        if self.credentials is not None:
            headers |= urllib3.make_headers(basic_auth=self.credentials)
        reply = urllib3.request(
            method,
            f"{self.url}{path}",
            headers=headers,
            body=None if body is None else json.dumps(body),
            redirect=False,
            retries=False,
            timeout=20,
        )
        return reply.status, reply.data.decode()

    def status(self, path: str, method: str = "GET", body: object = None) -> int:
        return self(path, method, body)[0]


@pytest.fixture
def flower(role: RoleStarter) -> Role:
    return role("flower", FLOWER_BASIC_AUTH=CREDENTIALS)


@pytest.fixture
def browser(flower: Role) -> Browser:
    return Browser(flower.settings["FLOWER_URL"])


@pytest.fixture
def app(celery_broker_url: str) -> Iterator[Celery]:
    app = Celery("chargebridge-test", broker=celery_broker_url, set_as_current=False)
    yield app
    app.close()


def publish(
    app: Celery, customer_id: str, *, hidden: bool = True, countdown: float | None = None
) -> str:
    """One charge as a bridge publishes it, or as somebody who hides nothing would."""
    told = event(customer_id=customer_id, description=MARKER, metadata={"note": MARKER})
    key = charge_key(told.customer_id, told.billing_period)
    shown = {"argsrepr": repr((key,)), "kwargsrepr": "{'source': 'nsq'}"} if hidden else {}
    app.send_task(
        "tasks.charge",
        args=[key],
        kwargs={"event": told.to_json(), "source": "nsq"},
        task_id=str(uuid4()) if hidden else f"open-{customer_id}",
        queue="charges",
        countdown=countdown,
        **shown,
    )
    return key


PAGES = ("/", "/workers", "/tasks", "/broker", "/metrics", "/api/workers", "/api/task/types")


def test_pages_api_and_metrics_are_for_those_with_credentials(browser: Browser) -> None:
    for credentials, expected in (
        (None, 401),
        ("somebody:wrong", 401),
        ("other:a long password", 401),
        (CREDENTIALS, 200),
    ):
        visitor = Browser(browser.url, credentials)
        assert {path: visitor.status(path) for path in PAGES} == dict.fromkeys(PAGES, expected)
    assert Browser(browser.url, None).status("/healthcheck") == 200


FENCED = (
    ("GET", "/api/tasks"),
    ("GET", "/api/task/info/x"),
    ("GET", "/api/task/result/x"),
    ("POST", "/api/task/apply/tasks.charge"),
    ("POST", "/api/task/send-task/tasks.charge"),
    ("POST", "/api/task/send-task/anything.at_all"),
    ("POST", "/api/task/async-apply/tasks.charge"),
    ("POST", "/api/task/async-apply/tasks.sweep"),
    ("POST", "/api/task/async-apply/celery.accumulate"),
    ("POST", "/api/task/revoke/x"),
    ("POST", "/api/task/revoke/x?terminate=true"),
    ("POST", "/api/task/abort/x"),
    ("POST", "/api/task/timeout/tasks.charge"),
    ("POST", "/api/task/rate-limit/tasks.charge"),
    ("POST", "/api/worker/pool/restart/x"),
    ("POST", "/api/worker/pool/shrink/x"),
    ("POST", "/api/worker/pool/autoscale/x"),
    ("POST", "/api/worker/queue/cancel-consumer/x"),
)


def test_what_could_lose_or_double_a_charge_is_refused_to_everybody(
    browser: Browser, celery_broker_url: str
) -> None:
    asked = {"args": ["0" * 32], "kwargs": {}}
    for credentials, expected in ((None, 401), (CREDENTIALS, 403)):
        visitor = Browser(browser.url, credentials)
        got = {f"{m} {path}": visitor.status(path, m, asked) for m, path in FENCED}
        assert got == dict.fromkeys(got, expected)
    with redis_client.Redis.from_url(celery_broker_url) as broker:
        assert broker.llen("charges") == broker.llen("control") == 0


def test_nothing_of_an_event_is_served_or_stored(
    role: RoleStarter,
    flower: Role,
    browser: Browser,
    app: Celery,
    ledger: Ledger,
    stripe: Stripe,
    fault_point: FaultPoints,
    tmp_path: Path,
) -> None:
    fault_point("worker.before_claim", "hold")
    worker = role("worker", concurrency=1, **HELD_LONG)
    # From here on it hears all that happens to tasks.
    name = _full_name(browser, worker)
    keys = [publish(app, "b", hidden=False), publish(app, "c", hidden=False, countdown=8)]
    keys.append(publish(app, "a"))
    fault_point.wait_reached("worker.before_claim")
    # One charge runs, one waits for its time: Celery tells their arguments to whoever inspects.
    inspect = app.control.inspect([name], timeout=2)
    told = wait_until(
        lambda: [answer for answer in (inspect.active(), inspect.scheduled()) if _tasks(answer)],
        WITHIN_S,
        "an inspection",
    )
    assert MARKER in repr(told)
    served = [browser(f"/worker/{name}")[1], browser(f"/api/workers?workername={name}")[1]]
    served.append(browser(f"/api/workers?refresh=1&workername={name}")[1])
    assert all(name in one for one in served)
    fault_point.release("worker.before_claim")
    wait_until(lambda: _settled(ledger, keys), WITHIN_S, "all are charged")
    wait_until(lambda: _count(browser, "state:SUCCESS") == 3, WITHIN_S, "Flower knows of them")
    served += [browser("/task/open-b")[1], _table(browser, ""), browser("/metrics")[1]]
    assert keys[-1] in served[-2]
    assert "(hidden)" in served[-3]
    for secret in (MARKER, flower.settings["STRIPE_API_KEY"], flower.settings["DATABASE_URL"]):
        assert secret not in "\n".join(served)
    assert _count(browser, f"kwargs:{MARKER}") == _count(browser, MARKER) == 0
    state = _saved_state(tmp_path / "roles" / flower.name)
    assert MARKER.encode() not in state
    assert MARKER not in flower.log() + worker.log()


def _tasks(answer: dict[str, list[Any]] | None) -> bool:
    return answer is not None and bool(answer) and all(answer.values())


def _full_name(browser: Browser, worker: Role) -> str:
    def named() -> str | None:
        known = json.loads(browser("/api/workers?status=1")[1])
        return next((name for name in known if name.startswith(f"{worker.name}@")), None)

    return wait_until(named, WITHIN_S, "Flower knows the worker") or ""


def _settled(ledger: Ledger, keys: list[str]) -> bool:
    found = ledger.read_statuses(keys)
    return len(found) == len(keys) and all(one.state is State.CHARGED for one in found.values())


def _table(browser: Browser, search: str) -> str:
    query = {
        "draw": "1",
        "start": "0",
        "length": "50",
        "search[value]": search,
        "order[0][column]": "0",
        "columns[0][data]": "name",
        "order[0][dir]": "asc",
    }
    status, text = browser("/tasks/datatable?" + urlencode(query))
    assert status == 200, text
    return text


def _count(browser: Browser, search: str) -> int:
    return int(json.loads(_table(browser, search))["recordsFiltered"])


def _saved_state(folder: Path) -> bytes:
    def saved() -> list[bytes]:
        return [found for path in folder.iterdir() if b"open-b" in (found := _content(path))]

    return b"".join(wait_until(saved, WITHIN_S, "Flower saves what it knows"))


def _content(path: Path) -> bytes:
    """Nothing of a file that Flower has just replaced."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def test_a_broken_state_file_does_not_keep_flower_from_starting(
    role: RoleStarter, tmp_path: Path
) -> None:
    folder = tmp_path / "roles" / "flower-1"
    folder.mkdir()
    (folder / "flower.db").write_bytes(b"half of a data")
    flower = role("flower", FLOWER_BASIC_AUTH=CREDENTIALS)
    assert Browser(flower.settings["FLOWER_URL"]).status("/") == 200


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"FLOWER_BASIC_AUTH": ""}, "FLOWER_BASIC_AUTH is not set"),
        ({"FLOWER_BASIC_AUTH": "no_password"}, "FLOWER_BASIC_AUTH must be user:password"),
        ({"CELERY_BROKER_URL": ""}, "CELERY_BROKER_URL is not set"),
    ],
)
def test_flower_without_what_it_needs_says_so_in_one_line(
    environment: dict[str, str], changes: dict[str, str], says: str
) -> None:
    code, errors = _start(environment | changes, binaries.CHECKOUT)
    assert (code, errors.strip()) == (1, f"chargebridge: {says}")


def test_flower_does_not_start_where_its_fences_are_not(
    environment: dict[str, str], tmp_path: Path
) -> None:
    code, errors = _start(environment, tmp_path, PYTHONPATH=str(binaries.CHECKOUT))
    assert code == 1
    assert errors.strip() == "chargebridge: flowerconfig.py is not here; start Flower where it is"


def _start(environment: dict[str, str], folder: Path, **more: Any) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "tasks", "flower", f"--port={free_port()}"],
        check=False,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        env={**roles.base_environment(folder), **environment, **more},
        cwd=folder,
    )
    return done.returncode, done.stderr
