"""Makes the shared fixtures known to every test."""

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

__all__ = [
    "another_nsqd",
    "books",
    "celery_broker_url",
    "database_url",
    "engine",
    "environment",
    "fault_point",
    "ledger",
    "nsq_topic",
    "pipeline",
    "redis_url",
    "role",
    "services",
    "session_services",
    "settings",
    "shared_pipeline",
    "stripe",
    "vault",
    "vault_starter",
]
