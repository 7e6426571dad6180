"""An nsqd that is away, hangs half way, or moves: how a bridge of ours finds it again."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bridges import host_names
from bridges import nsq as bridges_nsq
from bridges.bridge import Bridge
from bridges.nsq import RECONNECT_S
from sandbox.ports import free_port
from tests.support.bridges import SOON_S, Start, start
from tests.support.brokers import Nsq
from tests.support.nsq_gates import certificate
from tests.support.producers import billing_event
from tests.support.proxy import Proxy
from tests.support.services import Services
from tests.support.waiting import stays, wait_until

__all__ = ["certificate", "start"]

CLIENT_HELLO = b"\x16\x03\x01"
"""What a TLS handshake begins with."""


@pytest.fixture
def environment(
    services: Services, database_url: str, celery_broker_url: str, nsq_topic: str
) -> dict[str, str]:
    return {
        **services.stack.settings,
        "DATABASE_URL": database_url,
        "CELERY_BROKER_URL": celery_broker_url,
        "NSQ_TOPIC": nsq_topic,
        "NSQ_LOOKUPD_HTTP_ADDRESS": "",
        "LIMITS_CHECK": "warn",
    }


class NameServer:
    """Stands in for the system's look-up of one name: tells, refuses, or does not answer."""

    NAME = "nsqd.test"

    def __init__(self) -> None:
        self.addresses: list[str] = []
        """None: there is no such host."""
        self.asked = threading.Event()
        self.answers = threading.Event()
        self._ask_system = socket.getaddrinfo

    def __call__(self, host: Any, port: Any, *arguments: Any, **options: Any) -> Any:
        if host != self.NAME:
            return self._ask_system(host, port, *arguments, **options)
        self.asked.set()
        self.answers.wait(3 * SOON_S)
        if not self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "no such host")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, 0)) for a in self.addresses]


@pytest.fixture
def name_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    server = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", server)
    yield server
    server.answers.set()


def by_name(environment: dict[str, str]) -> dict[str, str]:
    port = environment["NSQD_TCP_ADDRESS"].rpartition(":")[2]
    return {**environment, "NSQD_TCP_ADDRESS": f"{NameServer.NAME}:{port}"}


def second_handles(of: Bridge) -> int:
    return len(of.source._reader._handshakes)  # type: ignore[attr-defined]  # none may be left


def test_an_nsqd_that_stays_away_is_asked_at_a_steady_pace(
    environment: dict[str, str], start: Start
) -> None:
    """Guard: pynsq's own reconnect, 15 s after each close, must not add to the bridge's."""
    begun = time.monotonic()
    bridge = start(environment, NSQD_TCP_ADDRESS=f"127.0.0.1:{free_port()}")

    def at_most() -> float:
        return 2 + (time.monotonic() - begun) / (0.5 * RECONNECT_S)

    stays(lambda: bridge.count("connect_failed") <= at_most(), 28.0, "one try after another")
    assert bridge.count("connect_failed") >= 28 / (2 * RECONNECT_S), "it is not given up either"


def test_a_handshake_that_hangs_is_given_up_and_made_anew(
    environment: dict[str, str],
    another_nsqd: Callable[..., dict[str, str]],
    start: Start,
    certificate: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bridges_nsq, "CONNECT_LIMIT_S", 1.0)
    options = (f"--tls-cert={certificate}", f"--tls-key={certificate.with_suffix('.key')}")
    secured = {**environment, **another_nsqd(*options, "--tls-required=tcp-https")}
    nsq = Nsq(secured)
    with Proxy("127.0.0.1", int(secured["NSQD_TCP_ADDRESS"].rpartition(":")[2])) as proxy:
        proxy.swallow_from = CLIENT_HELLO
        through = {"NSQD_TCP_ADDRESS": f"127.0.0.1:{proxy.port}", "NSQ_TLS_CA": str(certificate)}
        bridge = start(secured, **through)
        bridge.wait_count("connect_failed", 2)
        assert bridge.count("connected") == 0
        proxy.swallow_from = b""
        nsq.publish(billing_event("after_the_thaw"))

        def taken() -> bool:
            # Again and again: a connection may just be about to set it.
            proxy.swallow = False
            return bridge.count("taken") >= 1

        wait_until(taken, SOON_S, "taken")
        assert bridge.call(second_handles) == 0


def test_a_name_server_that_is_silent_does_not_hold_up_the_bridge(
    environment: dict[str, str], services: Services, start: Start, name_server: NameServer
) -> None:
    services.need("nsqd")
    nsq = Nsq(environment)
    bridge = start(by_name(environment))
    assert name_server.asked.wait(SOON_S)
    bridge.call(lambda _bridge: None)  # the loop comes round to it while nobody has answered
    assert not name_server.answers.is_set()
    name_server.answers.set()
    bridge.wait_count("connect_failed", 2)  # no such host, for now
    name_server.addresses = ["127.0.0.1"]
    nsq.publish(billing_event("found"))
    bridge.wait_count("taken", 1)


def test_a_look_up_that_takes_too_long_is_a_failed_try(
    environment: dict[str, str],
    start: Start,
    name_server: NameServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_names, "LOOKUP_LIMIT_S", 0.5)
    bridge = start(by_name(environment))
    bridge.wait_count("connect_failed", 2)
    bridge.stop()
    assert not name_server.answers.is_set(), "a look-up that hangs keeps no bridge from ending"


def test_each_address_of_a_name_has_its_turn(
    environment: dict[str, str], services: Services, start: Start, name_server: NameServer
) -> None:
    services.need("nsqd")
    nsq = Nsq(environment)
    name_server.addresses = ["127.0.0.2", "127.0.0.1"]  # nsqd listens at the second alone
    name_server.answers.set()
    bridge = start(by_name(environment))
    nsq.publish(billing_event("second"))
    bridge.wait_count("taken", 1)
    assert bridge.count("connect_failed") == 1


def test_a_certificate_is_checked_against_the_name_that_was_given(
    environment: dict[str, str],
    another_nsqd: Callable[..., dict[str, str]],
    start: Start,
    certificate: Path,
    name_server: NameServer,
) -> None:
    options = (f"--tls-cert={certificate}", f"--tls-key={certificate.with_suffix('.key')}")
    secured = {**environment, **another_nsqd(*options)}
    name_server.addresses = ["127.0.0.1"]
    name_server.answers.set()
    # It is made out to 127.0.0.1, where the name leads to, but not to the name.
    bridge = start(by_name(secured), NSQ_TLS_CA=str(certificate))
    bridge.wait_count("connect_failed", 1)
    assert bridge.count("connected") == 0
