"""Errors of a dead broker connection that the library lets through do not end a worker."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from celery.worker.consumer import Consumer
from celery.worker.request import Request
from kombu import Connection, Message

from tasks.lost_broker import LastingConsumer
from tasks.unrevokable import UnrevokableRequest, UnrevokableTask


class ForgetfulConnection(Connection):  # type: ignore[misc]  # an untyped library
    """As a half-closed channel of the Redis transport: closing it is a mistake of its own."""

    def close(self) -> None:
        raise AttributeError("'NoneType' object has no attribute 'hostname'")


def consumer_of(kind: Any) -> Any:
    from tasks.celery_app import app  # noqa: PLC0415 - only this test needs a whole app

    consumer = kind.__new__(kind)
    consumer.app = app
    consumer.connection = ForgetfulConnection("memory://")
    return consumer


@pytest.fixture
def broker_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", "memory://")


@pytest.mark.usefixtures("broker_setting")
def test_a_lost_connection_that_cannot_be_closed_is_let_go(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lost = ConnectionError("the broker is gone")
    with pytest.raises(AttributeError):
        consumer_of(Consumer).on_connection_error_after_connected(lost)
    consumer = consumer_of(LastingConsumer)
    with caplog.at_level(logging.WARNING, "tasks.lost_broker"):
        consumer.on_connection_error_after_connected(lost)
    assert consumer.connection is None
    assert [record.message for record in caplog.records if record.name == "tasks.lost_broker"] == [
        "lost_connection_not_closed"
    ]


class ClosedChannel:
    no_ack_consumers = None

    def basic_ack(self, *_: Any, **__: Any) -> None:
        raise AttributeError("'NoneType' object has no attribute 'hostname'")


def request_of(kind: Any) -> Any:
    message = Message(
        body="[[], {}, {}]",
        delivery_tag="tag",
        content_type="application/json",
        content_encoding="utf-8",
        headers={"id": "1", "task": "tasks.charge"},
        channel=ClosedChannel(),
    )
    return kind(
        message, on_ack=message.ack_log_error, task=UnrevokableTask(), connection_errors=(OSError,)
    )


def test_an_ack_over_a_closed_connection_is_logged_and_not_raised() -> None:
    assert UnrevokableTask.Request is UnrevokableRequest
    with pytest.raises(AttributeError):
        request_of(Request).acknowledge()
    request = request_of(UnrevokableRequest)
    request.acknowledge()
    assert request.acknowledged
