"""The limit of requests to Stripe is one for all workers, and never holds anybody up for long."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from models.errors import ConfigurationError
from models.ledger import boot_clock_s
from models.settings import load_settings
from tasks.errors import StripeUnavailable
from tasks.rate_limit import BURST_S, RateLimiter
from tests.support.services import Services

PER_S = 40
ENDPOINT_PER_S = 20
SOON_S = 5.0


def limiter(url: str, **given: int) -> RateLimiter:
    values = {"per_s": PER_S, "endpoint_per_s": ENDPOINT_PER_S, **given}
    return RateLimiter(url, "key", **values)


@pytest.fixture
def one(redis_url: str) -> Iterator[RateLimiter]:
    made = limiter(redis_url)
    yield made
    made.close()


def took_s(turns: int, *limiters: RateLimiter, endpoints: tuple[str, ...] = ("a",)) -> float:
    """Seconds for this many turns, spread over the limiters and endpoints."""
    begun = time.monotonic()

    def turn(number: int) -> None:
        found = limiters[number % len(limiters)]
        found.take(endpoints[number % len(endpoints)], boot_clock_s() + SOON_S)

    with ThreadPoolExecutor(turns) as pool:
        list(pool.map(turn, range(turns)))
    return time.monotonic() - begun


def take_many(one: RateLimiter, turns: int) -> None:
    for _ in range(turns):
        one.take("a", boot_clock_s() + 0.01)


def test_two_workers_share_the_rate_of_an_endpoint(redis_url: str, one: RateLimiter) -> None:
    turns = 30
    burst = ENDPOINT_PER_S * BURST_S
    assert took_s(turns, one, limiter(redis_url)) > (turns - burst - 1) / ENDPOINT_PER_S


def test_all_endpoints_together_keep_the_total(one: RateLimiter) -> None:
    turns = 40
    expected_s = (turns - PER_S * BURST_S - 1) / PER_S
    assert took_s(turns, one, endpoints=("a", "b", "c", "d")) > expected_s


def test_a_turn_that_would_come_too_late_is_refused_at_once(one: RateLimiter) -> None:
    for _ in range(int(ENDPOINT_PER_S * BURST_S)):
        one.take("a", boot_clock_s() + SOON_S)
    begun = time.monotonic()
    with pytest.raises(StripeUnavailable, match="rate_limited"):
        take_many(one, ENDPOINT_PER_S)
    assert time.monotonic() - begun < 1.0
    # What was refused has not used up the others' turns.
    one.take("b", boot_clock_s() + 0.1)


def test_a_refusal_by_stripe_halves_everybodys_pace(redis_url: str, one: RateLimiter) -> None:
    other = limiter(redis_url)
    one.slow_down()
    one.slow_down()  # within the same second: one sign, not two
    turns = 20
    burst = ENDPOINT_PER_S * BURST_S
    slowed_s = took_s(turns, other)
    assert slowed_s > (turns - burst - 1) / (ENDPOINT_PER_S * 0.6)
    assert slowed_s < turns / (ENDPOINT_PER_S * 0.4)


@pytest.mark.parametrize("outage", ["frozen", "gone"])
def test_without_redis_requests_pass_and_an_alarm_rings(
    services: Services,
    redis_url: str,
    one: RateLimiter,
    caplog: pytest.LogCaptureFixture,
    outage: str,
) -> None:
    one.take("a", boot_clock_s() + SOON_S)
    if outage == "frozen":
        services.freeze("redis")
    else:
        services.kill("redis")
    with caplog.at_level(logging.ERROR):
        begun = time.monotonic()
        for _ in range(10 * PER_S):
            one.take("a", boot_clock_s() + SOON_S)
        assert time.monotonic() - begun < 2.0, "bounded, however many requests wait"
    alarms = [line for line in caplog.records if line.message == "alarm_limiter_lost"]
    assert len(alarms) == 1


@pytest.mark.parametrize("rule", ["none", "optional", "required"])
def test_both_spellings_of_a_certificate_rule_are_read(rule: str) -> None:
    for name in (rule, f"CERT_{rule.upper()}"):
        made = limiter(f"rediss://127.0.0.1:1/0?ssl_cert_reqs={name}")
        made.close()
    with pytest.raises(ConfigurationError, match="RATE_LIMIT_REDIS_URL"):
        limiter("rediss://127.0.0.1:1/0?ssl_cert_reqs=CERT_PERHAPS")


def test_the_limit_can_be_left_out_and_wants_a_redis_otherwise() -> None:
    off = load_settings({"STRIPE_RATE_PER_S": "0"})
    assert RateLimiter.from_settings(off, "key") is None
    wrong = load_settings({"CELERY_BROKER_URL": "amqp://x"})
    with pytest.raises(ConfigurationError, match="RATE_LIMIT_REDIS_URL"):
        RateLimiter.from_settings(wrong, "key")
    with pytest.raises(ConfigurationError, match="STRIPE_ENDPOINT_RATE_PER_S"):
        load_settings({"STRIPE_ENDPOINT_RATE_PER_S": "0"})
