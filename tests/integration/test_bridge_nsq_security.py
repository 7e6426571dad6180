"""TLS, certificates and the auth secret, against a real nsqd that asks for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.bridges import (
    Start,
    start,
)
from tests.support.brokers import Nsq
from tests.support.nsq_environment import environment
from tests.support.nsq_gates import Authority, authority, certificate
from tests.support.producers import billing_event

__all__ = ["authority", "certificate", "environment", "start"]


def test_messages_come_over_tls_from_the_nsqd_that_the_certificate_names(
    environment: dict[str, str],
    another_nsqd: Callable[..., dict[str, str]],
    start: Start,
    certificate: Path,
) -> None:
    options = (f"--tls-cert={certificate}", f"--tls-key={certificate.with_suffix('.key')}")
    secured = {**environment, **another_nsqd(*options, "--tls-required=tcp-https")}
    nsq = Nsq(secured)
    bridge = start(secured, NSQ_TLS_CA=str(certificate))
    nsq.publish(billing_event("secured"))
    bridge.wait_count("taken", 1)
    assert nsq.clients()[0]["tls"] is True
    by_name = secured["NSQD_TCP_ADDRESS"].replace("127.0.0.1", "localhost")
    stranger = start(secured, NSQ_TLS_CA=str(certificate), NSQD_TCP_ADDRESS=by_name)
    stranger.wait_count("connect_failed", 1)
    assert stranger.count("connected") == 0


def test_an_nsqd_without_tls_is_never_read_in_the_clear(
    environment: dict[str, str], start: Start, certificate: Path
) -> None:
    nsq = Nsq(environment)
    nsq.publish(billing_event("in_the_clear"))
    bridge = start(environment, NSQ_TLS_CA=str(certificate))
    bridge.wait_count("tls_refused", 2)
    assert bridge.count("taken") == 0


def test_an_nsqd_that_asks_for_a_secret_is_read_with_the_right_one(
    environment: dict[str, str],
    another_nsqd: Callable[..., dict[str, str]],
    start: Start,
    authority: Authority,
) -> None:
    guarded = {**environment, **another_nsqd(f"--auth-http-address={authority.address}")}
    nsq = Nsq(guarded)
    bridge = start(guarded, NSQ_AUTH_SECRET=authority.secret)
    nsq.publish(billing_event("guarded"))
    bridge.wait_count("taken", 1)
    assert nsq.clients()[0]["authed"] is True
    stranger = start(guarded, NSQ_AUTH_SECRET="guessed")
    stranger.wait_count("E_AUTH_FAILED", 1)
    assert stranger.count("taken") == 0


def test_an_nsqd_that_asks_for_a_certificate_is_shown_one(
    environment: dict[str, str],
    another_nsqd: Callable[..., dict[str, str]],
    start: Start,
    certificate: Path,
) -> None:
    key = certificate.with_suffix(".key")
    files = (f"--tls-cert={certificate}", f"--tls-key={key}", f"--tls-root-ca-file={certificate}")
    policy = ("--tls-client-auth-policy=require-verify", "--tls-required=tcp-https")
    mutual = {**environment, **another_nsqd(*files, *policy)}
    nsq = Nsq(mutual)
    told = {"NSQ_TLS_CA": str(certificate), "NSQ_TLS_CERT": str(certificate)}
    bridge = start(mutual, **told, NSQ_TLS_KEY=str(key))
    nsq.publish(billing_event("mutual"))
    bridge.wait_count("taken", 1)
    stranger = start(mutual, NSQ_TLS_CA=str(certificate))
    stranger.wait_count("connect_failed", 1)
    assert stranger.count("connected") == 0
