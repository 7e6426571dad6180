"""Makes the shared fixtures known to every test."""

import os
from dataclasses import fields

from models.limits import Limits
from models.settings import Settings
from tests.support.charge_driver import driver
from tests.support.fixtures import (
    another_nsqd,
    celery_broker_url,
    database_url,
    engine,
    environment,
    fault_point,
    ledger,
    nsq_topic,
    pipeline,
    redis_url,
    role,
    services,
    session_services,
    settings,
    shared_pipeline,
    stripe,
)
from tests.support.vault import books, vault, vault_starter
from tests.support.vaulted_workers import make_vaulted_worker, runs, vaulted_worker

__all__ = [
    "another_nsqd",
    "books",
    "celery_broker_url",
    "database_url",
    "driver",
    "engine",
    "environment",
    "fault_point",
    "ledger",
    "make_vaulted_worker",
    "nsq_topic",
    "pipeline",
    "redis_url",
    "role",
    "runs",
    "services",
    "session_services",
    "settings",
    "shared_pipeline",
    "stripe",
    "vault",
    "vault_starter",
    "vaulted_worker",
]


def pytest_configure() -> None:
    """The shell may have a running stack's settings loaded: tests must not reach that stack."""
    for item in (*fields(Settings), *fields(Limits)):
        os.environ.pop(item.name.upper(), None)
    os.environ.pop("LIMITS_CHECK", None)
