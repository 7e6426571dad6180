"""The limit of requests to Stripe over all workers: one budget in Redis, per endpoint and in all.

It is taken before a record is claimed, so that nothing waits with a lease in its hand. A worker
reserves its turn and sleeps until it comes. When Stripe says "too many" all the same, everybody
slows down and recovers bit by bit. Without Redis nobody is held up: Stripe's own refusal is the
backstop, and an alarm says so.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from models.errors import ConfigurationError
from models.ledger import boot_clock_s
from tasks.alarms import Alarm, ring
from tasks.errors import StripeUnavailable

if TYPE_CHECKING:
    from models.settings import Settings

REDIS_ANSWER_S: Final = 0.5
"""Redis answers within this, or requests go without the limit for `PAUSE_S`."""
PAUSE_S: Final = 5.0
ALARM_EVERY_S: Final = 30.0
BURST_S: Final = 0.25
"""This much of a second's budget may go out at once after a rest."""
KEPT_S: Final = 60
SLOWEST: Final = 0.1
"""The share of the budget that is always left, however often Stripe says "too many"."""
RECOVERY_S: Final = 30.0
"""From the slowest back to the whole budget."""
SLOW_DOWN_EVERY_S: Final = 1.0
"""Refusals within this time are one sign, not many."""
SCHEMES: Final = ("redis", "rediss", "unix")

_NOW = "local t = redis.call('TIME') local now = t[1] * 1000000 + t[2] "
_FACTOR = (
    "local function factor(key) "
    "local seen = redis.call('HMGET', key, 'factor', 'at') "
    "if not seen[1] then return 1 end "
    "return math.min(1, seen[1] + (now - seen[2]) * tonumber(ARGV[1])) end "
)
TAKE: Final = (
    _NOW
    + _FACTOR
    + """
local share = factor(KEYS[1])
local start, wait = {}, 0
for i = 2, #KEYS do
  start[i] = math.max(tonumber(redis.call('GET', KEYS[i]) or 0), now)
  wait = math.max(wait, start[i] - now - tonumber(ARGV[2]))
end
if wait > tonumber(ARGV[3]) then return -1 end
for i = 2, #KEYS do
  local step = 1000000 / (tonumber(ARGV[i + 3]) * share)
  redis.call('SET', KEYS[i], string.format('%.0f', start[i] + step), 'EX', ARGV[4])
end
return math.floor(wait)
"""
)
"""Microseconds to wait for the turn that is now reserved; -1: it would come too late."""
SLOW_DOWN: Final = (
    _NOW
    + _FACTOR
    + """
local at = redis.call('HGET', KEYS[1], 'at')
if at and now - at < tonumber(ARGV[2]) then return 0 end
local share = math.max(tonumber(ARGV[3]), factor(KEYS[1]) / 2)
redis.call('HSET', KEYS[1], 'factor', tostring(share), 'at', string.format('%.0f', now))
redis.call('EXPIRE', KEYS[1], ARGV[4])
return 1
"""
)


def _client(url: str) -> redis.Redis:
    """Raises ConfigurationError for options that the library does not know."""
    try:
        client = redis.Redis.from_url(
            _as_redis_spells_it(url),
            socket_timeout=REDIS_ANSWER_S,
            socket_connect_timeout=REDIS_ANSWER_S,
            # A script that ran and whose answer was lost has taken its turn: once is enough.
            retry=Retry(NoBackoff(), 0),
        )
        # Otherwise the first request would find out.
        pool = client.connection_pool
        pool.connection_class(**pool.connection_kwargs)
    except (ValueError, TypeError, redis.RedisError):
        # Not repeated here: it may hold a password.
        raise ConfigurationError(
            "RATE_LIMIT_REDIS_URL (or CELERY_BROKER_URL, where it is not set): "
            "what follows the ? is not an option of a Redis connection"
        ) from None
    return client


def _as_redis_spells_it(url: str) -> str:
    """In a broker's URL Celery also takes Python's own names of the certificate rules."""
    for name in ("none", "optional", "required"):
        url = url.replace(f"ssl_cert_reqs=CERT_{name.upper()}", f"ssl_cert_reqs={name}")
    return url


class RateLimiter:
    """The budget of one Stripe key. Threads may share it; so do all processes, through Redis."""

    def __init__(self, redis_url: str, key_id: str, *, per_s: int, endpoint_per_s: int) -> None:
        self.per_s = per_s
        self.endpoint_per_s = min(endpoint_per_s, per_s)
        self._prefix = f"chargebridge:rate:{key_id}"
        self._redis = _client(redis_url)
        self._take = self._redis.register_script(TAKE)
        self._slow_down = self._redis.register_script(SLOW_DOWN)
        self._recovery = (1 - SLOWEST) / (RECOVERY_S * 1e6)
        self._lock = threading.Lock()
        self._without_until_s = 0.0
        self._alarm_at_s = -ALARM_EVERY_S

    @classmethod
    def from_settings(cls, settings: Settings, key_id: str) -> RateLimiter | None:
        """None when STRIPE_RATE_PER_S is 0. Raises ConfigurationError."""
        if not settings.stripe_rate_per_s:
            return None
        # Of several brokers the first: one budget needs one place.
        url = settings.rate_limit_redis_url or settings.celery_broker_url.partition(";")[0]
        if url.partition("://")[0] not in SCHEMES:
            raise ConfigurationError(
                "RATE_LIMIT_REDIS_URL: a redis:// address is needed for the limit on requests "
                "to Stripe (STRIPE_RATE_PER_S=0 goes without)"
            )
        return cls(
            url,
            key_id,
            per_s=settings.stripe_rate_per_s,
            endpoint_per_s=settings.stripe_endpoint_rate_per_s,
        )

    def take(self, endpoint: str, deadline_s: float) -> None:
        """Wait for a turn on an endpoint, no longer than the deadline (boot-time clock).

        Raises StripeUnavailable(`rate_limited`) when the turn would come too late.
        """
        left_s = deadline_s - boot_clock_s()
        keys = [f"{self._prefix}:factor", f"{self._prefix}:all", f"{self._prefix}:{endpoint}"]
        arguments = [
            self._recovery,
            BURST_S * 1e6,
            max(0.0, left_s * 1e6),
            KEPT_S,
            self.per_s,
            self.endpoint_per_s,
        ]
        wait = self._ask(self._take, keys, arguments)
        if wait < 0:
            raise StripeUnavailable("rate_limited")
        if wait:
            time.sleep(wait / 1e6)

    def slow_down(self) -> None:
        """Stripe has refused a request as one too many: half the pace for everybody."""
        keys = [f"{self._prefix}:factor"]
        arguments = [self._recovery, SLOW_DOWN_EVERY_S * 1e6, SLOWEST, int(2 * RECOVERY_S)]
        if self._ask(self._slow_down, keys, arguments):
            ring(Alarm.RATE_LIMITED)

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def _ask(self, script: Any, keys: list[str], arguments: list[float]) -> int:
        """A script's number; 0, which lets everything pass, while Redis does not answer."""
        if time.monotonic() < self._without_until_s:
            return 0
        try:
            return int(script(keys=keys, args=arguments))
        except redis.RedisError as error:
            self._lost(error)
            return 0

    def _lost(self, error: redis.RedisError) -> None:
        now_s = time.monotonic()
        with self._lock:
            self._without_until_s = now_s + PAUSE_S
            due = now_s - self._alarm_at_s >= ALARM_EVERY_S
            if due:
                self._alarm_at_s = now_s
        if due:
            ring(Alarm.LIMITER_LOST, why=type(error).__name__)
