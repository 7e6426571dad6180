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
SOON_S = 60.0
BUSY_S = 30.0
"""What a busy machine may take for what takes no time."""


def limiter(url: str, **given: int) -> RateLimiter:
    values = {"per_s": PER_S, "endpoint_per_s": ENDPOINT_PER_S, **given}
    return RateLimiter(url, "key", **values)


@pytest.fixture
def one(redis_url: str) -> Iterator[RateLimiter]:
    made = limiter(redis_url)
    yield made
    made.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Redis that is slow on a busy machine is waited for, and not done without."""
    monkeypatch.setattr("tasks.rate_limit.REDIS_ANSWER_S", BUSY_S)


class Clock:
    """Stands for `time` in the limiter: notes how long a turn is waited for, and does not wait."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self.slept_s: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("tasks.rate_limit.time", clock)
    return clock


def took_s(turns: int, *limiters: RateLimiter, endpoints: tuple[str, ...] = ("a",)) -> float:
    """Seconds for this many turns, spread over the limiters and endpoints."""
    begun = time.monotonic()

    def turn(number: int) -> None:
        found = limiters[number % len(limiters)]
        found.take(endpoints[number % len(endpoints)], boot_clock_s() + SOON_S)

    with ThreadPoolExecutor(turns) as pool:
        list(pool.map(turn, range(turns)))
    return time.monotonic() - begun


@pytest.mark.usefixtures("patient")
def test_two_workers_share_the_rate_of_an_endpoint(redis_url: str, one: RateLimiter) -> None:
    turns = 30
    burst = ENDPOINT_PER_S * BURST_S
    assert took_s(turns, one, limiter(redis_url)) > (turns - burst - 1) / ENDPOINT_PER_S


@pytest.mark.usefixtures("patient")
def test_all_endpoints_together_keep_the_total(one: RateLimiter) -> None:
    turns = 40
    expected_s = (turns - PER_S * BURST_S - 1) / PER_S
    assert took_s(turns, one, endpoints=("a", "b", "c", "d")) > expected_s


@pytest.mark.usefixtures("patient")
def test_a_turn_that_would_come_too_late_is_refused_at_once(redis_url: str, clock: Clock) -> None:
    one = limiter(redis_url, endpoint_per_s=1)
    for _ in range(30):
        one.take("a", boot_clock_s() + SOON_S)
    waits = len(clock.slept_s)
    # The next turn there is half a minute away.
    for _ in range(5 * PER_S):
        with pytest.raises(StripeUnavailable, match="rate_limited"):
            one.take("a", boot_clock_s() + 1.0)
    assert len(clock.slept_s) == waits
    # What was refused, five seconds of the whole budget, has not used up the others' turns.
    one.take("b", boot_clock_s() + 1.0)
    one.close()


@pytest.mark.usefixtures("patient")
def test_a_refusal_by_stripe_halves_everybodys_pace(
    redis_url: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Neither is over while this test lasts.
    monkeypatch.setattr("tasks.rate_limit.SLOW_DOWN_EVERY_S", 2 * BUSY_S)
    monkeypatch.setattr("tasks.rate_limit.RECOVERY_S", 100 * BUSY_S)
    one, other = (limiter(redis_url, endpoint_per_s=1) for _ in range(2))
    one.slow_down()
    one.slow_down()  # within the same time: one sign, not two
    turns = 60
    begun = time.monotonic()
    for _ in range(turns):
        other.take("a", boot_clock_s() + 10 * SOON_S)
    # The last turn comes so long after the first, whatever the way to it took.
    slowed_s = time.monotonic() - begun + clock.slept_s[-1]
    assert turns / 0.6 < slowed_s < turns / 0.4
    one.close()
    other.close()


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
        # Each of them alone would wait for half a second.
        assert time.monotonic() - begun < BUSY_S, "bounded, however many requests wait"
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
