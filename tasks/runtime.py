"""What a worker process works with, built at first use in the process that uses it.

Engine and HTTP client hold sockets: two processes on one of them would read each other's rows
and replies. Everything is keyed by process id, so that a forked child builds its own.
"""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.database import make_engine
from models.ledger import Ledger
from models.ledger_reads import LedgerReads
from models.settings import Settings, load_settings

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from tasks.stripe_gateway import StripeGateway

POOL_SIZE = 4
"""Database connections that one process keeps. Each is needed for one statement at a time, so
the slots of a threads worker share them."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """Settings, ledger and gateway of one process."""

    settings: Settings
    engine: Engine
    ledger: Ledger
    reads: LedgerReads
    gateway: StripeGateway


_lock = threading.Lock()
_runtimes: dict[int, Runtime] = {}


def runtime() -> Runtime:
    """This process's own runtime. Raises ConfigurationError for settings that are missing."""
    found = _runtimes.get(os.getpid())
    if found is not None:
        return found
    with _lock:
        return _runtimes.setdefault(os.getpid(), _runtimes.get(os.getpid()) or build_runtime())


def build_runtime(settings: Settings | None = None) -> Runtime:
    """A runtime of its own; nothing is connected yet."""
    # Stripe's library takes half a second to import: commands that never call it do not pay.
    from tasks.rate_limit import RateLimiter  # noqa: PLC0415
    from tasks.requests import upstream_key_id  # noqa: PLC0415
    from tasks.stripe_gateway import StripeGateway  # noqa: PLC0415

    settings = settings or load_settings()
    settings.require("database_url", "stripe_api_key", "stripe_api_base")
    key_id = upstream_key_id(settings.stripe_api_key)
    limiter = RateLimiter.from_settings(settings, key_id)
    gateway = StripeGateway(settings.stripe_api_key, settings.stripe_api_base, limiter)
    engine = make_engine(settings, pool_size=POOL_SIZE, name="chargebridge-worker")
    return Runtime(
        settings=settings,
        engine=engine,
        ledger=Ledger(engine, settings.limits, actor=f"worker@{socket.gethostname()}"),
        reads=LedgerReads(engine),
        gateway=gateway,
    )


def forget_parent() -> None:
    """After a fork: drop what the parent built, without touching the sockets it still uses."""
    for pid in [pid for pid in _runtimes if pid != os.getpid()]:
        _runtimes.pop(pid).engine.dispose(close=False)
