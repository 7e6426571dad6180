"""Celery's settings as they are: what a publisher meets at a broker that does not answer."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import redis as redis_client
from celery import Celery
from kombu.exceptions import OperationalError

from models.limits import MAX_CLOCK_OFF_S
from sandbox import binaries, roles
from sandbox.ports import free_port
from tests.support.roles import RoleStarter
from tests.support.services import Services
from tests.support.waiting import wait_until

FAILS_WITHIN_S = 9.0
"""Less than the library's own tries take; one try takes two seconds."""


@pytest.fixture
def conf(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What celeryconfig.py says under this test's environment."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return runpy.run_path(str(binaries.CHECKOUT / "celeryconfig.py"))


@pytest.fixture
def app(conf: dict[str, Any]) -> Iterator[Celery]:
    app = Celery("chargebridge-test", set_as_current=False)
    app.config_from_object(SimpleNamespace(**conf))
    yield app
    app.close()


def publish(app: Celery) -> None:
    app.send_task("tasks.charge", args=["0" * 32], queue="charges")


def test_a_frozen_broker_fails_every_publish_soon(app: Celery, services: Services) -> None:
    publish(app)
    services.freeze("redis")
    for _ in range(2):
        began_s = time.monotonic()
        with pytest.raises(OperationalError):
            publish(app)
        assert time.monotonic() - began_s < FAILS_WITHIN_S
    services.thaw("redis")
    with redis_client.Redis.from_url(app.conf.broker_url) as client:
        assert client.ping(), "it has come round"
    publish(app)


def test_a_broker_that_is_gone_fails_every_publish_soon(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The environment goes before Celery's settings.
    monkeypatch.setenv("CELERY_BROKER_URL", f"redis://127.0.0.1:{free_port()}/0")
    began_s = time.monotonic()
    with pytest.raises(OperationalError):
        publish(app)
    assert time.monotonic() - began_s < FAILS_WITHIN_S


def test_a_publish_is_tried_once(conf: dict[str, Any]) -> None:
    assert conf["task_publish_retry_policy"]["max_retries"] == 0


def test_nothing_is_acknowledged_before_it_was_worked_on_and_no_result_is_kept(
    conf: dict[str, Any],
) -> None:
    assert conf["task_acks_late"] is True
    assert conf["task_reject_on_worker_lost"] is True
    assert conf["worker_prefetch_multiplier"] == 1
    assert conf["accept_content"] == ["json"]
    assert conf["result_backend"] is None
    assert conf["task_ignore_result"] is True


def test_expired_messages_hold_up_no_later_ones(app: Celery, role: RoleStarter) -> None:
    """Guard: they are acknowledged, or two of them fill the control worker's prefetch for good."""
    gone = datetime.now(UTC) - timedelta(seconds=1)
    for _ in range(5):
        app.send_task("tasks.sweep", queue="control", expires=gone)
    worker = role("worker-control")
    app.send_task("tasks.sweep", queue="control", task_id="the-living-one")
    wait_until(
        lambda: re.search(r"tasks.sweep\[the-living-one\] succeeded", worker.log()),
        30,
        "a later sweep runs",
    )
    assert worker.log().count("task_expired") == 5


def test_beat_is_not_silenced_by_a_time_that_lies_in_the_future(conf: dict[str, Any]) -> None:
    schedule = conf["beat_schedule"]["sweep"]["schedule"]
    now = schedule.now()
    assert schedule.is_due(now + timedelta(days=1)) == (True, schedule.seconds)
    assert schedule.is_due(now - timedelta(days=1)).is_due
    schedule.nowfun = lambda: now
    assert schedule.is_due(now) == (False, schedule.seconds)


def printed(code: str, environment: dict[str, str]) -> str:
    """What this prints in a Python of its own."""
    return subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
        cwd=binaries.CHECKOUT,
        env={**os.environ, **environment},
    ).stdout


def test_beat_can_keep_its_schedule(environment: dict[str, str]) -> None:
    code = (
        "import celeryconfig, pickle; kept = celeryconfig.beat_schedule['sweep']['schedule']; "
        "print(pickle.loads(pickle.dumps(kept)) == kept)"
    )
    assert printed(code, environment) == "True\n"


def test_two_clocks_that_differ_expire_no_sweep(conf: dict[str, Any]) -> None:
    assert conf["beat_schedule"]["sweep"]["options"]["expires"] > MAX_CLOCK_OFF_S


def test_what_celery_reads_by_itself_is_what_was_checked() -> None:
    code = (
        "import os, tasks; tasks.app.conf.task_queues; print(tasks.app.conf.broker_read_url, "
        "tasks.app.conf.result_backend, os.environ['CELERY_BROKER_URL'])"
    )
    others = ("CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL", "CELERY_RESULT_BACKEND")
    told = {
        "CELERY_BROKER_URL": "  redis://127.0.0.1:7/0 ",
        **dict.fromkeys(others, "redis://elsewhere/0"),
    }
    assert printed(code, told).split() == ["redis://127.0.0.1:7/0", "None", "redis://127.0.0.1:7/0"]


def test_charges_and_control_have_queues_of_their_own(app: Celery) -> None:
    routes = {
        name: app.amqp.router.route({}, name)["queue"].name
        for name in ("tasks.charge", "tasks.sweep", "tasks.recharge", "tasks.reconcile")
    }
    assert routes.pop("tasks.charge") == "charges"
    assert set(routes.values()) == {"control"}


def test_loading_the_app_reads_no_settings(environment: dict[str, str]) -> None:
    code = "import tasks, tasks.charge, tasks.sweep; print(tasks.app.main, tasks.app.configured)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env=roles.base_environment(binaries.CHECKOUT),
        cwd=binaries.CHECKOUT,
    )
    assert done.stdout.split() == ["chargebridge", "False"]
