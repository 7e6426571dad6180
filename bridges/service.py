"""A bridge as a process: logs, checks, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any

from bridges.dispatcher import Publisher, make_publisher
from bridges.health import listen, serving
from bridges.start import (
    LEDGER_THREADS,
    PUBLISH_THREADS,
    assemble,
    check_ledger,
    check_nsq,
    check_redis,
    check_settings,
    check_task_queue,
    source_maker,
)
from bridges.threads import DaemonThreads
from models import faults
from models.database import make_engine
from models.logs import configure_logging
from models.settings import load_settings

if TYPE_CHECKING:
    import socket

    from models.ledger import Ledger
    from models.settings import Settings

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve(kind: str) -> None:
    """Run the bridge for `nsq` or `redis` until it is told to stop.

    Raises ConfigurationError or LedgerUnavailable, within seconds, when a part that it needs
    is not there at the start. A part that goes away later is waited for.
    """
    name = f"bridge-{kind}"
    configure_logging(name)
    settings = load_settings()
    check_settings(settings, kind)
    faults.enable(settings.faults_dir or None)
    engine = make_engine(settings, pool_size=LEDGER_THREADS, name=f"chargebridge-{name}")
    try:
        ledger = check_ledger(engine, settings, name)
        publisher = make_publisher(settings.max_amount_cents)
        check_task_queue(publisher)
        if kind == "nsq":
            check_nsq(settings)
        else:
            check_redis(settings)
        probes = listen(settings.bridge_health_listen)
        _run_logged(_serve(settings, kind, ledger, publisher, probes))
    finally:
        engine.dispose()


def _run_logged(work: Coroutine[Any, Any, None]) -> None:
    """A bug ends the process with a log line; what was held comes round to another bridge."""
    try:
        asyncio.run(work)
    except BaseExceptionGroup as group:
        for error in _leaves(group):
            logger.critical("bridge_failed", exc_info=error)
        raise SystemExit(1) from None


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


async def _serve(
    settings: Settings,
    kind: str,
    ledger: Ledger,
    publisher: Publisher,
    probes: list[socket.socket],
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop.set)
    with (
        DaemonThreads(LEDGER_THREADS, "ledger") as for_ledger,
        DaemonThreads(PUBLISH_THREADS, "publish") as for_publishing,
    ):
        executors = (for_ledger, for_publishing)
        bridge = assemble(settings, source_maker(kind), ledger, publisher, executors)
        logger.info("bridge_started", extra={"max_in_flight": settings.bridge_max_in_flight})
        with serving(bridge, probes, settings.bridge_stalled_after_s):
            await bridge.run(stop)
