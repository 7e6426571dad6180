"""What keeps a bridge from starting: one clear line that names the setting, soon, and exit 1."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from models.database import make_engine
from models.ledger import Ledger
from models.settings import load_settings
from tests.support.commands import Commands

WITHIN_S = 20.0
"""Twice what is promised: the machine may be busy with other tests."""
AWAY = "127.0.0.1:1"


@pytest.fixture
def commands(environment: dict[str, str], tmp_path: Path) -> Commands:
    home = tmp_path / "home"
    home.mkdir()
    return Commands(environment, home)


@pytest.mark.parametrize(
    ("kind", "name", "value", "line"),
    [
        ("nsq", "NSQD_TCP_ADDRESS", AWAY, "NSQD_TCP_ADDRESS: 127.0.0.1:1 does not answer"),
        ("nsq", "NSQD_TCP_ADDRESS", "somewhere", "NSQD_TCP_ADDRESS: must be host:port"),
        ("nsq", "NSQD_HTTP_ADDRESS", AWAY, "NSQD_HTTP_ADDRESS: 127.0.0.1:1 does not answer"),
        ("nsq", "NSQ_CHANNEL", "charge#ephemeral", "NSQ_CHANNEL: an #ephemeral one drops"),
        ("nsq", "NSQ_TOPIC", "no blanks", "NSQ_TOPIC: must be 1 to 64 letters"),
        ("nsq", "CELERY_BROKER_URL", f"redis://{AWAY}/0", "CELERY_BROKER_URL: the broker does"),
        ("nsq", "CELERY_BROKER_URL", "carrier://pigeon", "CELERY_BROKER_URL: Celery cannot"),
        ("redis", "REDIS_URL", f"redis://{AWAY}/0", "REDIS_URL: "),
        ("redis", "REDIS_URL", "nonsense", "REDIS_URL: "),
        ("redis", "REDIS_URL", " ", "REDIS_URL is not set"),
        ("redis", "REDIS_GROUP", "no blanks", "REDIS_GROUP: must be 1 to 255 characters"),
        ("redis", "DATABASE_URL", f"postgresql://{AWAY}/x", "DATABASE_URL: "),
        ("redis", "DATABASE_URL", " ", "DATABASE_URL is not set"),
        ("redis", "CELERY_BROKER_URL", " ", "CELERY_BROKER_URL is not set"),
        ("redis", "CHARGE_NAMESPACE", "another", "CHARGE_NAMESPACE is not the one"),
        ("redis", "CHARGE_NAMESPACE", "a:b", "CHARGE_NAMESPACE: "),
        ("redis", "BRIDGE_MAX_IN_FLIGHT", "0", "BRIDGE_MAX_IN_FLIGHT must be 1 or more"),
        ("redis", "LEASE_S", "1", "HARD_LIMIT_S"),
    ],
)
def test_a_setting_that_cannot_work_is_named_in_one_line(
    commands: Commands, kind: str, name: str, value: str, line: str
) -> None:
    if value == "another":
        settings = load_settings(commands.environment)
        Ledger(make_engine(settings), settings.limits, "test").pin_deployment("stripe-billing")
    begun = time.monotonic()
    assert commands.refused("bridge", kind, **{name: value}).startswith(line)
    assert time.monotonic() - begun < WITHIN_S
