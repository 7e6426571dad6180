"""The only reader of the environment: what a process was told, and the checks at start."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Final

from models.addresses import split_address
from models.errors import ConfigurationError
from models.keys import DEFAULT_NAMESPACE, check_namespace
from models.limits import FAST_LIMITS, Limits, check_limits
from models.money import MAX_AMOUNT_CENTS, MAX_TOTAL_CENTS
from models.texts import is_utf8
from models.urls import URL_CHECKS

MAX_RATE_PER_S: Final = 100_000
MAX_LIMIT: Final = 10 * 365 * 86_400
"""Ten years of seconds: beyond some size a time can no longer be reckoned with."""
MAX_VAULT_CONCURRENCY: Final = 512
_FERNET_KEY: Final = re.compile(r"[A-Za-z0-9_-]{43}=")


@dataclass(frozen=True, slots=True)
class Settings:
    """What a process was told. Empty means not set; `require` says so in one line."""

    database_url: str = field(default="", repr=False)
    database_pooled: bool = False
    """A transaction pooler stands in front of PostgreSQL: no prepared statements."""
    celery_broker_url: str = field(default="", repr=False)
    redis_url: str = field(default="", repr=False)
    redis_stream: str = "billing-stream"
    redis_group: str = "billing-group"
    redis_payload_field: str = "payload"
    nsqd_tcp_address: str = ""
    nsqd_http_address: str = ""
    nsq_lookupd_http_address: str = ""
    nsq_topic: str = "billing-events"
    nsq_channel: str = "stripe-processor"
    nsq_tls_ca: str = ""
    nsq_tls_cert: str = ""
    nsq_tls_key: str = ""
    nsq_auth_secret: str = field(default="", repr=False)
    stream_trim: bool = False
    """Entries that every group of the stream has acked are trimmed away."""
    bridge_max_in_flight: int = 200
    bridge_max_queue_depth: int = 10_000
    """Charges that may wait on the Celery queue; beyond it a bridge publishes no more. 0: any."""
    bridge_max_unsettled_age_s: float = 900
    """Many records unsettled for longer and none that settles: a bridge all but stops. 0: never."""
    bridge_health_listen: str = ""
    """`host:port` of a bridge's /healthz, /readyz and /metrics; empty: there are none."""
    bridge_stalled_after_s: float = 120
    """A bridge that holds deliveries and moves none for so long says that it is not healthy."""
    stripe_api_key: str = field(default="", repr=False)
    stripe_api_base: str = "https://api.stripe.com"
    stripe_charge_api: str = "payment_intents"
    """Which of Stripe's endpoints new charges go to: payment_intents or charges."""
    stripe_rate_per_s: int = 80
    """Requests to Stripe in a second over all workers; 0: no limit of ours."""
    stripe_endpoint_rate_per_s: int = 20
    """Of those, on one endpoint. Stripe's own limits: 100 live, 25 in test mode or an endpoint."""
    rate_limit_redis_url: str = field(default="", repr=False)
    """Where the workers share that limit; the Celery broker's Redis when not set."""
    vault_mode: str = ""
    vault_url: str = ""
    vault_admin_key: str = field(default="", repr=False)
    vault_listen: str = "127.0.0.1:8410"
    """`host:port` the vault listens on; beyond loopback only with TLS or an explicit word."""
    vault_tls_cert: str = ""
    vault_tls_key: str = ""
    vault_allow_plain: bool = False
    """The explicit word: plain HTTP beyond loopback is wanted (behind a proxy that has TLS)."""
    vault_concurrency: int = 64
    """Requests that one vault process forwards at the same time; more are told to wait."""
    vault_encryption_keys: str = field(default="", repr=False)
    """Fernet keys with commas between; the first encrypts, all decrypt."""
    run_auto_open_expected_cents: int = 0
    """Expected total of a run that a worker opens by itself; 0: it never does."""
    charge_namespace: str = DEFAULT_NAMESPACE
    max_amount_cents: int = MAX_AMOUNT_CENTS
    flower_basic_auth: str = field(default="", repr=False)
    flower_url: str = ""
    faults_dir: str = ""
    operator: str = ""
    """Who stands in the audit of manual actions; the OS user when not set."""
    limits: Limits = field(default_factory=Limits)
    warnings: tuple[str, ...] = ()

    def require(self, *names: str) -> None:
        """Raise ConfigurationError for the first of these settings that is not set."""
        for name in names:
            if not getattr(self, name):
                raise ConfigurationError(f"{name.upper()} is not set")


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read and check the environment (or the mapping given, in tests).

    Raises ConfigurationError, with the names of the settings at fault and never their values,
    for a value that cannot be read and for time limits that contradict each other.
    """
    source = os.environ if environ is None else environ
    values: dict[str, object] = {}
    for item in fields(Settings):
        text = source.get(item.name.upper(), "").strip()
        if text and item.name not in ("limits", "warnings"):
            values[item.name] = _parse(item.name, text, item.type)
    settings = Settings(**values)  # type: ignore[arg-type]  # each value was parsed to its field
    _check_urls(settings)
    _check_namespace(settings.charge_namespace)
    limits = _load_limits(source)
    _check_vault(settings)
    _check_bridge(settings)
    if settings.stripe_charge_api not in ("payment_intents", "charges"):
        raise ConfigurationError("STRIPE_CHARGE_API must be payment_intents or charges")
    if not 1 <= settings.max_amount_cents <= MAX_TOTAL_CENTS:
        raise ConfigurationError(f"MAX_AMOUNT_CENTS must be from 1 to {MAX_TOTAL_CENTS}")
    _check_rates(settings)
    warnings = check_limits(limits, warn_only=source.get("LIMITS_CHECK", "") == "warn")
    return replace(settings, limits=limits, warnings=warnings)


def _check_urls(settings: Settings) -> None:
    for name, check in URL_CHECKS.items():
        if text := getattr(settings, name):
            check(name.upper(), text)


def _is_address(text: str, *, lowest_port: int) -> bool:
    try:
        split_address(text, lowest=lowest_port)
    except ValueError:
        return False
    return True


def _check_namespace(namespace: str) -> None:
    try:
        check_namespace(namespace)
    except ConfigurationError as error:
        raise ConfigurationError(f"CHARGE_NAMESPACE: {error}") from None


def _check_vault(settings: Settings) -> None:
    if settings.vault_mode not in ("", "self", "hosted", "off"):
        raise ConfigurationError("VAULT_MODE must be self, hosted or off")
    if bool(settings.vault_tls_cert) != bool(settings.vault_tls_key):
        raise ConfigurationError("VAULT_TLS_CERT and VAULT_TLS_KEY belong together")
    if not _is_address(settings.vault_listen, lowest_port=0):
        raise ConfigurationError("VAULT_LISTEN must be host:port")
    if not 1 <= settings.vault_concurrency <= MAX_VAULT_CONCURRENCY:
        raise ConfigurationError(f"VAULT_CONCURRENCY must be from 1 to {MAX_VAULT_CONCURRENCY}")
    if not 0 <= settings.run_auto_open_expected_cents <= MAX_TOTAL_CENTS:
        raise ConfigurationError(
            f"RUN_AUTO_OPEN_EXPECTED_CENTS must be from 0 to {MAX_TOTAL_CENTS}"
        )
    for key in filter(None, settings.vault_encryption_keys.split(",")):
        if not _FERNET_KEY.fullmatch(key.strip()):
            raise ConfigurationError(
                "VAULT_ENCRYPTION_KEYS must be Fernet keys (32 bytes in URL-safe base64) "
                "with commas between"
            )


def _check_bridge(settings: Settings) -> None:
    if settings.bridge_max_queue_depth < 0:
        raise ConfigurationError("BRIDGE_MAX_QUEUE_DEPTH must be 0 or more")
    if not 0 <= settings.bridge_max_unsettled_age_s < math.inf:
        raise ConfigurationError("BRIDGE_MAX_UNSETTLED_AGE_S must be a finite number, 0 or more")
    if not 0 < settings.bridge_stalled_after_s < math.inf:
        raise ConfigurationError("BRIDGE_STALLED_AFTER_S must be a finite number above 0")
    listen = settings.bridge_health_listen
    if listen and not _is_address(listen, lowest_port=1):
        raise ConfigurationError("BRIDGE_HEALTH_LISTEN must be host:port")


def _check_rates(settings: Settings) -> None:
    if not 0 <= settings.stripe_rate_per_s <= MAX_RATE_PER_S:
        raise ConfigurationError(f"STRIPE_RATE_PER_S must be from 0 to {MAX_RATE_PER_S}")
    if not 1 <= settings.stripe_endpoint_rate_per_s <= MAX_RATE_PER_S:
        raise ConfigurationError(f"STRIPE_ENDPOINT_RATE_PER_S must be from 1 to {MAX_RATE_PER_S}")


def _load_limits(source: Mapping[str, str]) -> Limits:
    chosen = source.get("LIMITS", "").strip() or "default"
    if chosen not in ("default", "fast"):
        raise ConfigurationError("LIMITS must be default or fast")
    limits = FAST_LIMITS if chosen == "fast" else Limits()
    given = {
        item.name: _parse(item.name, source[item.name.upper()].strip(), item.type)
        for item in fields(Limits)
        if source.get(item.name.upper(), "").strip()
    }
    for name, value in given.items():
        if not (isinstance(value, int | float) and 0 < value <= MAX_LIMIT):
            raise ConfigurationError(
                f"{name.upper()} must be a number above 0 and up to {MAX_LIMIT}"
            )
    return replace(limits, **given)  # type: ignore[arg-type]  # parsed to the fields' own types


def _parse(name: str, text: str, kind: object) -> object:
    if not is_utf8(text):
        raise ConfigurationError(f"{name.upper()} is not UTF-8")
    try:
        if kind == "bool":
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[
                text.lower()
            ]
        if kind == "int":
            return int(text)
        if kind == "float":
            return float(text)
    except (ValueError, KeyError):
        # The value itself is not repeated: a secret may have been put under the wrong name.
        raise ConfigurationError(f"{name.upper()} is not a valid {kind}") from None
    return text
