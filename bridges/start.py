"""Makes a bridge out of settings, after it has asked every part whether it is there."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import TYPE_CHECKING, Final

from bridges.addresses import check_nsq_names, check_redis_names
from bridges.bridge import Bridge, Parts
from bridges.commit_watcher import CommitWatcher
from bridges.counters import Counters
from bridges.dead_letter_writer import DeadLetterWriter
from bridges.delivery import Source, SourceUnavailable
from bridges.dispatcher import Dispatcher, Publisher
from bridges.sweep_watch import SweepWatch
from bridges.threads import LedgerCalls
from bridges.unsettled_age import UnsettledAge
from models.addresses import addresses
from models.database import check_database
from models.dead_letters import DeadLetters
from models.deployment import pin_deployment
from models.errors import ConfigurationError
from models.keys import check_namespace
from models.ledger import Ledger
from models.ledger_reads import LedgerReads

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from bridges.nsqd import Greeting
    from models.settings import Settings

logger = logging.getLogger(__name__)

LEDGER_THREADS: Final = 4
"""One for each that asks the ledger, so that none waits behind another's call that hangs."""
PUBLISH_THREADS: Final = 1
POOL_SIZE: Final = LEDGER_THREADS


def check_settings(settings: Settings, kind: str) -> None:
    """Refuse settings under which the bridge could not work; warn about wasteful ones."""
    settings.require("database_url", "celery_broker_url")
    check_namespace(settings.charge_namespace)
    if settings.bridge_max_in_flight < 1:
        raise ConfigurationError("BRIDGE_MAX_IN_FLIGHT must be 1 or more")
    if kind == "nsq":
        check_nsq_names(settings.nsq_topic, settings.nsq_channel)
        if not settings.nsq_lookupd_http_address:
            settings.require("nsqd_tcp_address")
        check_files(settings)
    else:
        settings.require("redis_url")
        check_redis_names(settings.redis_stream, settings.redis_group, settings.redis_payload_field)
    for warning in settings.warnings:
        logger.warning("limits", extra={"warning": warning})


def check_files(settings: Settings) -> None:
    """Refuse certificate files that cannot be read: the library would only fail to connect."""
    for setting in ("nsq_tls_ca", "nsq_tls_cert", "nsq_tls_key"):
        path = getattr(settings, setting)
        if path and not os.access(path, os.R_OK):
            raise ConfigurationError(f"{setting.upper()}: the file cannot be read")
    if settings.nsq_tls_cert and not settings.nsq_tls_ca:
        raise ConfigurationError("NSQ_TLS_CA is not set, but NSQ_TLS_CERT is")


def check_ledger(engine: Engine, settings: Settings, actor: str) -> Ledger:
    """A ledger that is there, migrated, durable, and of this namespace."""
    check_database(engine)
    pin_deployment(engine, settings.charge_namespace)
    return Ledger(engine, settings.limits, actor)


def check_task_queue(publisher: Publisher) -> None:
    """Raise ConfigurationError unless the Celery broker takes a connection."""
    try:
        publisher.connect()
    except publisher.errors as error:
        raise ConfigurationError(
            f"CELERY_BROKER_URL: the broker does not answer ({type(error).__name__})"
        ) from None


def check_nsq(settings: Settings) -> None:
    """Raise ConfigurationError unless nsqd answers; make topic and channel where possible.

    Of several nsqd one is enough, and with a named nsqd a lookupd that is away is no hindrance.
    """
    from bridges.nsqd import create_channel, greet, ping  # noqa: PLC0415 - only this bridge's

    ask = partial(greet, greeting=_greeting(settings))
    _check_one_answers("NSQD_TCP_ADDRESS", settings.nsqd_tcp_address, ask)
    try:
        lookupd = settings.nsq_lookupd_http_address
        _check_one_answers("NSQ_LOOKUPD_HTTP_ADDRESS", lookupd, ping)
    except ConfigurationError as error:
        if not settings.nsqd_tcp_address:
            raise
        logger.warning("nsqlookupd_away", extra={"problem": str(error)})
    make = partial(create_channel, topic=settings.nsq_topic, channel=settings.nsq_channel)
    _check_one_answers("NSQD_HTTP_ADDRESS", settings.nsqd_http_address, make)


def _greeting(settings: Settings) -> Greeting:
    from bridges.nsqd import Greeting  # noqa: PLC0415 - only this bridge's

    context: ssl.SSLContext | None = None
    if settings.nsq_tls_ca:
        try:
            context = ssl.create_default_context(cafile=settings.nsq_tls_ca)
            if settings.nsq_tls_cert:
                context.load_cert_chain(settings.nsq_tls_cert, settings.nsq_tls_key or None)
        except OSError:
            raise ConfigurationError(
                "NSQ_TLS_CA, NSQ_TLS_CERT, NSQ_TLS_KEY: not certificates and a key in PEM"
            ) from None
    secret = settings.nsq_auth_secret
    return Greeting(settings.nsq_topic, settings.nsq_channel, secret, context)


def _check_one_answers(setting: str, text: str, ask: Callable[[str], object]) -> None:
    named = addresses(setting, text)
    problems: list[str] = []
    for address in named:
        try:
            ask(address)
        except SourceUnavailable as error:
            problems.append(f"{setting}: {error}")
    if problems and len(problems) == len(named):
        raise ConfigurationError(problems[0])
    for problem in problems:
        logger.warning("nsqd_away", extra={"problem": problem})


def check_redis(settings: Settings) -> None:
    """Make the group, which tells whether Redis is there, is new enough and has a stream."""
    from bridges.redis_streams import prepare  # noqa: PLC0415 - only this bridge's

    try:
        asyncio.run(prepare(settings))
    except SourceUnavailable as error:
        raise ConfigurationError(f"REDIS_URL: {error}") from None


def source_maker(kind: str) -> Callable[[Settings, Counters], Source]:
    """The adapter of a broker; the other one's libraries are not loaded."""
    if kind == "nsq":
        from bridges.nsq_source import NsqSource  # noqa: PLC0415

        return NsqSource
    from bridges.redis_streams import RedisStreamSource  # noqa: PLC0415

    return RedisStreamSource


def assemble(
    settings: Settings,
    source: Callable[[Settings, Counters], Source],
    ledger: Ledger,
    publisher: Publisher,
    executors: tuple[Executor, Executor],
) -> Bridge:
    """Put the parts together; inside the running event loop."""
    counters = Counters()
    for_ledger, for_publishing = executors
    dispatcher = Dispatcher(
        publisher,
        for_publishing,
        settings.limits,
        counters,
        max_depth=settings.bridge_max_queue_depth,
    )
    reads = LedgerReads(ledger.engine)
    parts = Parts(
        watcher=CommitWatcher(ledger, LedgerCalls(for_ledger), settings.limits),
        dispatcher=dispatcher,
        unsettled_age=UnsettledAge(
            reads, LedgerCalls(for_ledger), dispatcher, settings.bridge_max_unsettled_age_s
        ),
        sweep_watch=SweepWatch(reads, LedgerCalls(for_ledger), dispatcher, settings.limits),
        dead_letters=DeadLetterWriter(
            DeadLetters(ledger.engine), LedgerCalls(for_ledger), settings.limits
        ),
        executor=for_ledger,
        counters=counters,
    )
    return Bridge(source(settings, counters), parts, settings)
