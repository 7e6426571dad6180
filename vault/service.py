"""Starts the vault as the settings say, and serves until it is told to stop."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import ssl
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from models.billing_runs import BillingRuns
from models.clocks import check_clock
from models.database import check_database, make_engine
from models.errors import ConfigurationError, LedgerUnavailable
from models.faults import enable
from models.logs import configure_logging
from models.settings import load_settings
from vault.account import AccountCheck
from vault.app import ADMIN_THREADS, STOP_MARGIN_S, Vault
from vault.forwarder import Forwarder
from vault.holds import Holds
from vault.keys import Admin
from vault.metrics import Metrics
from vault.upstream import Upstream

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from models.settings import Settings

DATABASE_CONNECTIONS: Final = 16
"""Statements are short: many more forwards than connections can be under way."""
MIN_ADMIN_KEY_CHARACTERS: Final = 16

logger = logging.getLogger(__name__)


def serve() -> None:
    """Run the vault in this process. Raises ConfigurationError or LedgerUnavailable at start."""
    settings = load_settings()
    check_settings(settings)
    tls = tls_context(settings)
    engine = make_engine(settings, pool_size=ADMIN_THREADS, name="chargebridge-vault")
    check_database(engine)
    check_clock(engine)
    configure_logging("vault")
    account = AccountCheck(settings, engine)
    account.run_once()
    enable(settings.faults_dir or None)
    for warning in settings.warnings:
        logger.warning("limits_warning", extra={"detail": warning})
    try:
        asyncio.run(_serve(settings, engine, tls, account))
    finally:
        engine.dispose()


def check_settings(settings: Settings) -> None:
    """Refuse what would be unsafe. Raises ConfigurationError, naming the setting."""
    settings.require("database_url", "stripe_api_key", "vault_admin_key")
    key = settings.vault_admin_key
    if len(key) < MIN_ADMIN_KEY_CHARACTERS or not key.isascii() or not key.isprintable():
        raise ConfigurationError(
            f"VAULT_ADMIN_KEY must be at least {MIN_ADMIN_KEY_CHARACTERS} ASCII characters"
        )
    if key == settings.stripe_api_key:
        raise ConfigurationError("VAULT_ADMIN_KEY and STRIPE_API_KEY must differ")
    host, _ = listen_address(settings)
    if not (is_loopback(host) or settings.vault_tls_cert or settings.vault_allow_plain):
        raise ConfigurationError(
            "VAULT_LISTEN: beyond loopback the vault needs VAULT_TLS_CERT and VAULT_TLS_KEY, "
            "or VAULT_ALLOW_PLAIN=yes behind a proxy that has TLS"
        )
    base = urlsplit(settings.stripe_api_base)
    if base.scheme != "https" and not is_loopback(base.hostname or ""):
        raise ConfigurationError("STRIPE_API_BASE must be https: the account key goes out with it")


def listen_address(settings: Settings) -> tuple[str, int]:
    """Host and port of VAULT_LISTEN."""
    host, _, port = settings.vault_listen.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine can reach, or be, this host."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """The certificate to serve with; None for plain HTTP. Raises ConfigurationError."""
    if not settings.vault_tls_cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.vault_tls_cert, settings.vault_tls_key)
    except (OSError, ssl.SSLError):
        raise ConfigurationError(
            "VAULT_TLS_CERT and VAULT_TLS_KEY: not a certificate and its key"
        ) from None
    return context


def build(settings: Settings, engine: Engine) -> Vault:
    """All parts of a vault, put together."""
    metrics = Metrics()
    upstream = Upstream(
        settings.stripe_api_base, settings.stripe_api_key, settings.limits.vault_upstream_s
    )
    holds = Holds(engine, settings.limits, upstream.key_id, DATABASE_CONNECTIONS)
    runs = BillingRuns(engine, "vault")
    return Vault(
        Forwarder(holds, upstream, metrics),
        Admin(runs, holds, settings.vault_admin_key, metrics),
        metrics,
        concurrency=settings.vault_concurrency,
        is_ready=lambda: _is_ready(engine),
    )


def _is_ready(engine: Engine) -> bool:
    try:
        check_database(engine)
    except (ConfigurationError, LedgerUnavailable):
        return False
    return True


async def _serve(
    settings: Settings, engine: Engine, tls: ssl.SSLContext | None, account: AccountCheck
) -> None:
    """Serve until SIGTERM or SIGINT, then let what is under way end.

    Ends as well, with a ConfigurationError, when the account turns out to be another one.
    """
    vault = build(settings, engine)
    host, port = listen_address(settings)
    try:
        port = vault.listen(host, port, tls)
    except OSError:
        raise ConfigurationError(
            f"VAULT_LISTEN: cannot listen on {settings.vault_listen}"
        ) from None
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    asking = asyncio.create_task(account.run(stop))
    logger.info("vault_started", extra={"host": host, "port": port, "tls": tls is not None})
    await stop.wait()
    logger.info("vault_stopping")
    await vault.stop(settings.limits.vault_upstream_s + STOP_MARGIN_S)
    await asking
    logger.info("vault_stopped")
