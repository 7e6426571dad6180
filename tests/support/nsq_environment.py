"""The settings of a bridge on NSQ with a ledger, a task queue and a topic of its own."""

from __future__ import annotations

import pytest

from tests.support.services import Services


@pytest.fixture
def environment(
    services: Services, database_url: str, celery_broker_url: str, nsq_topic: str
) -> dict[str, str]:
    services.need("nsqd")
    return {
        **services.stack.settings,
        "DATABASE_URL": database_url,
        "CELERY_BROKER_URL": celery_broker_url,
        "NSQ_TOPIC": nsq_topic,
        "LIMITS_CHECK": "warn",
        "BACKOFF_BASE_S": "0.2",
        "BACKOFF_CAP_S": "0.5",
    }
