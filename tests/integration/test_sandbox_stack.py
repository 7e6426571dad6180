"""The whole stack as `make up` and `make demo` give it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from sandbox.binaries import CHECKOUT
from sandbox.demo import Proof
from sandbox.envfile import read_env
from sandbox.health import get_json
from sandbox.roles import ROLES, VAULT, WORKER_SLOTS, celery
from sandbox.stack import Stack
from sandbox.supervisor import TICK_S
from tests.support.producers import billing_event, publish_nsq, publish_redis
from tests.support.sandboxes import Sandbox
from tests.support.stripe import Stripe
from tests.support.waiting import wait_until

WITHIN_S = 60.0

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    """A folder without a stack; whatever runs there afterwards is ended."""
    with tempfile.TemporaryDirectory(prefix="chargebridge-sandbox-") as folder:
        os.chmod(folder, 0o711)
        found = Sandbox(Path(folder) / "stack")
        yield found
        found.end()


def _ledger_now(settings: dict[str, str]) -> float:
    with psycopg.connect(settings["DATABASE_URL"]) as link:
        row = link.execute("SELECT extract(epoch FROM ledger_now())").fetchone()
    assert row is not None
    return float(row[0])


def _run_with(settings: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], **settings}
    return subprocess.run(
        command, check=False, cwd=CHECKOUT, env=environment, capture_output=True, text=True
    )


def _nodes(settings: dict[str, str]) -> str:
    """The last line of `celery status`."""
    done = _run_with(settings, *celery("status"))
    return done.stdout.strip().rpartition("\n")[2] if done.returncode == 0 else ""


def test_the_whole_stack_charges_survives_a_killed_worker_and_lets_a_day_pass(
    sandbox: Sandbox,
) -> None:
    sandbox.run("up", "--limits", "fast")
    settings = read_env(sandbox.directory / "env")
    stripe = Stripe(settings["STRIPE_API_BASE"])
    pids = sandbox.pids()
    assert set(pids) == set(Stack.load(sandbox.directory).names) >= set(ROLES) - {VAULT}

    worker = psutil.Process(pids["worker"])
    assert "worker" in worker.cmdline()
    assert worker.ppid() == sandbox.supervisor().pid
    assert len(worker.children()) >= WORKER_SLOTS

    # Every command works with nothing but the env file.
    # (A node that is busy for the second that it is given does not count.)
    wait_until(lambda: _nodes(settings) == "2 nodes online.", WITHIN_S, "both answer")

    publish_nsq(settings, billing_event("one"))
    publish_redis(settings, billing_event("one"))
    wait_until(lambda: len(stripe.charges()) == 1, WITHIN_S, "the event is charged")

    os.kill(pids["worker"], signal.SIGKILL)
    sandbox.wait_replaced("worker", pids["worker"])
    assert sandbox.back_after_s("worker") == [pytest.approx(TICK_S)]

    before = _ledger_now(settings)
    sandbox.run("clock", "--advance", "25h")
    assert _ledger_now(settings) - before >= 25 * 3600
    publish_redis(settings, billing_event("two"))
    two = wait_until(lambda: stripe.charges(amount=2500)[1:], WITHIN_S, "another event is charged")
    assert len(two) == 1
    created = sorted(charge["created"] for charge in stripe.charges())
    assert created[1] - created[0] >= 25 * 3600

    sandbox.run("down")
    assert sandbox.processes() == []
    with pytest.raises(OSError, match="no answer"):
        get_json(f"{stripe.base_url}/_sim/charges")


@contextmanager
def _demo_until_killed(sandbox: Sandbox, *arguments: str) -> Iterator[Iterator[str]]:
    """A demo whose lines can be read; it is killed afterwards, with an initdb that it may run."""
    command = [sys.executable, "-m", "sandbox", "--directory", str(sandbox.directory), "demo"]
    demo = subprocess.Popen(
        [*command, *arguments],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert demo.stdout is not None
    try:
        yield iter(demo.stdout)
    finally:
        os.killpg(demo.pid, signal.SIGKILL)
        demo.wait()
        demo.stdout.close()


def _proof(text: str) -> dict[str, Any]:
    found = json.loads(text.strip().splitlines()[-1])
    assert isinstance(found, dict)
    return found


def test_the_demo_ends_with_a_proof_that_holds_even_after_it_was_killed_once(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    with _demo_until_killed(sandbox, "--events", "24") as told:
        assert any("killed worker" in line for line in told)

    file = tmp_path / "proof.json"
    done = sandbox.run("demo", "--events", "24", "--json", str(file))
    proof = _proof(done.stdout)
    assert proof == json.loads(file.read_text())
    assert list(proof) == [field.name for field in fields(Proof)]
    assert (proof["published"], proof["distinct"], proof["charged"]) == (48, 24, 24)
    assert proof["ledger_total_cents"] == proof["stripe_total_cents"] > 0
    assert "LIMITS=fast" in done.stdout
    assert sandbox.processes() == []


def test_a_demo_beside_a_running_one_is_refused(sandbox: Sandbox) -> None:
    sandbox.directory.mkdir()
    with _demo_until_killed(sandbox) as told:
        assert "demo:" in next(told)
        refused = sandbox.run("demo", ok=False)
    assert refused.returncode == 1
    assert "running already" in refused.stderr
