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
    redis_url,
    role,
    services,
    session_services,
    settings,
    stripe,
)

__all__ = [
    "another_nsqd",
    "celery_broker_url",
    "database_url",
    "engine",
    "environment",
    "fault_point",
    "ledger",
    "nsq_topic",
    "redis_url",
    "role",
    "services",
    "session_services",
    "settings",
    "stripe",
]
