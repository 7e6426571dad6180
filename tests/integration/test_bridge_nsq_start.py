"""What keeps a bridge from starting: one clear line that names the setting, soon, and exit 1."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from models.database import make_engine
from models.deployment import pin_deployment
from models.settings import load_settings
from tests.support.commands import Commands
from tests.support.nsq_gates import Authority, authority, certificate
from tests.support.pipelines import SLACK_S

__all__ = ["authority", "certificate"]

WITHIN_S = 10.0 + SLACK_S
AWAY = "127.0.0.1:1"


@pytest.fixture
def commands(environment: dict[str, str], tmp_path: Path) -> Commands:
    home = tmp_path / "home"
    home.mkdir()
    return Commands(environment, home)


@pytest.mark.parametrize(
    ("kind", "name", "value", "line"),
    [
        ("nsq", "NSQ_TLS_CA", "/nowhere.pem", "NSQ_TLS_CA: the file cannot be read"),
        ("nsq", "NSQ_TLS_CA", __file__, "NSQ_TLS_CA, NSQ_TLS_CERT, NSQ_TLS_KEY: not certificates"),
        ("nsq", "BRIDGE_HEALTH_LISTEN", "nowhere", "BRIDGE_HEALTH_LISTEN must be host:port"),
        ("nsq", "BRIDGE_MAX_QUEUE_DEPTH", "-1", "BRIDGE_MAX_QUEUE_DEPTH must be 0 or more"),
        ("redis", "BRIDGE_STALLED_AFTER_S", "0", "BRIDGE_STALLED_AFTER_S must be a finite"),
        ("redis", "REDIS_URL", f"redis+sentinel://{AWAY}/billing", "REDIS_URL: "),
        ("redis", "REDIS_URL", "redis+sentinel://h:1", "REDIS_URL: must be redis+sentinel://"),
        ("redis", "REDIS_URL", f"redis+cluster://{AWAY}", "REDIS_URL: "),
        ("redis", "REDIS_URL", "redis+cluster://h:1/3", "REDIS_URL: must be redis+cluster://"),
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
        pin_deployment(make_engine(settings), "stripe-billing")
    begun = time.monotonic()
    assert commands.refused("bridge", kind, **{name: value}).startswith(line)
    assert time.monotonic() - begun < WITHIN_S


GuardedNsqd = Callable[..., dict[str, str]]


@pytest.mark.parametrize(
    ("secret", "topic", "line"),
    [
        ("guessed", ".*", "does not accept NSQ_AUTH_SECRET"),
        (" ", ".*", "wants a secret, but NSQ_AUTH_SECRET is not set"),
        ("open-sesame", "another", "NSQ_AUTH_SECRET does not open the topic and channel"),
    ],
)
def test_a_secret_that_opens_nothing_is_refused_in_one_line(
    commands: Commands,
    another_nsqd: GuardedNsqd,
    authority: Authority,
    secret: str,
    topic: str,
    line: str,
) -> None:
    authority.topic = topic
    guarded = another_nsqd(f"--auth-http-address={authority.address}")
    begun = time.monotonic()
    told = commands.refused("bridge", "nsq", **guarded, NSQ_AUTH_SECRET=secret)
    assert told == f"NSQD_TCP_ADDRESS: {guarded['NSQD_TCP_ADDRESS']}" + (
        f": {line}" if topic == "another" else f" {line}"
    )
    assert time.monotonic() - begun < WITHIN_S


def test_a_certificate_of_somebody_else_is_refused_in_one_line(
    commands: Commands, another_nsqd: GuardedNsqd, certificate: Path
) -> None:
    files = (f"--tls-cert={certificate}", f"--tls-key={certificate.with_suffix('.key')}")
    secured = another_nsqd(*files)
    elsewhere = secured["NSQD_TCP_ADDRESS"].replace("127.0.0.1", "localhost")
    begun = time.monotonic()
    told = commands.refused(
        "bridge",
        "nsq",
        **{**secured, "NSQD_TCP_ADDRESS": elsewhere},
        NSQ_TLS_CA=str(certificate),
    )
    assert told == f"NSQD_TCP_ADDRESS: {elsewhere}: no trusted TLS (CERTIFICATE_VERIFY_FAILED)"
    assert time.monotonic() - begun < WITHIN_S


def test_a_stream_of_another_type_is_refused_in_one_line(commands: Commands) -> None:
    with redis.Redis.from_url(commands.environment["REDIS_URL"]) as client:
        client.delete("billing-stream")
        client.set("billing-stream", "a string")
    begun = time.monotonic()
    assert commands.refused("bridge", "redis").startswith("REDIS_URL: WRONGTYPE")
    assert time.monotonic() - begun < WITHIN_S


def test_a_database_number_that_is_not_there_is_refused_in_one_line(commands: Commands) -> None:
    url = commands.environment["REDIS_URL"].rpartition("/")[0] + "/9999"
    begun = time.monotonic()
    assert commands.refused("bridge", "redis", REDIS_URL=url).startswith("REDIS_URL: ")
    assert time.monotonic() - begun < WITHIN_S
