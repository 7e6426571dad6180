"""The sandbox asks the stack it means, whatever settings the shell has loaded."""

from __future__ import annotations

import pytest

from sandbox import health
from tests.support.roles import RoleStarter
from tests.support.waiting import wait_until


def test_a_worker_is_asked_at_its_own_broker_though_the_shell_names_another(
    environment: dict[str, str], role: RoleStarter, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = role("worker-control")
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://127.0.0.1:1/0")
    wait_until(
        lambda: health.celery_worker(environment["CELERY_BROKER_URL"], worker.name) is None,
        30.0,
        "the worker answers",
    )
