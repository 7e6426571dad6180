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
    from tasks.vault_holds import VaultHolds

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
    holds: VaultHolds

    def close(self) -> None:
        """Close what is open to the database, Stripe and the vault."""
        self.engine.dispose()
        self.gateway.close()
        self.holds.close()


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
    from tasks.vault_access import VaultAccess  # noqa: PLC0415
    from tasks.vault_holds import VaultHolds  # noqa: PLC0415

    settings = settings or load_settings()
    settings.require("database_url", "vault_mode")
    if settings.vault_mode == "off":
        settings.require("stripe_api_key", "stripe_api_base")
    engine = make_engine(settings, pool_size=POOL_SIZE, name="chargebridge-worker")
    actor = f"worker@{socket.gethostname()}"
    vault = VaultAccess.from_settings(settings, engine, actor)
    key_id = upstream_key_id(settings.stripe_api_key if vault is None else vault.key_id_source)
    limiter = RateLimiter.from_settings(settings, key_id)
    return Runtime(
        settings=settings,
        engine=engine,
        ledger=Ledger(engine, settings.limits, actor=actor),
        reads=LedgerReads(engine),
        gateway=StripeGateway(
            settings.stripe_api_key, settings.stripe_api_base, limiter, vault=vault
        ),
        holds=VaultHolds.from_settings(settings),
    )


def forget_parent() -> None:
    """After a fork: drop what the parent built, without touching the sockets it still uses."""
    for pid in [pid for pid in _runtimes if pid != os.getpid()]:
        _runtimes.pop(pid).engine.dispose(close=False)
