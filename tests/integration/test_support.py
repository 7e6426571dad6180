"""The test services themselves: fresh for each test, mended after each."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import psycopg
import redis

from models.ledger import Ledger
from sandbox import clock, health
from sandbox.binaries import CHECKOUT
from sandbox.roles import REDIS_DATABASES
from tests.support.producers import billing_event, publish_nsq, publish_redis
from tests.support.sandboxes import GONE_WITHIN_S, alive
from tests.support.services import Services
from tests.support.waiting import stays, wait_until


def _now(url: str) -> float:
    with psycopg.connect(url) as link:
        row = link.execute("SELECT extract(epoch FROM ledger_now())").fetchone()
    assert row is not None
    return float(row[0])


def test_each_test_has_an_empty_migrated_ledger_of_its_own(
    ledger: Ledger, database_url: str, services: Services
) -> None:
    other = services.new_database()
    assert other != database_url
    assert ledger.read("0" * 32).record is None
    services.drop_database(other)


def test_a_lasting_redis_database_is_nobody_elses_until_it_is_given_back(
    services: Services,
) -> None:
    lasting = services.new_redis_database(lasting=True)
    others = [services.new_redis_database() for _ in range(2 * REDIS_DATABASES)]
    assert lasting not in others
    services.give_back(lasting)
    assert lasting in [services.new_redis_database() for _ in range(REDIS_DATABASES)]


def test_the_ledger_clock_moves_only_in_the_database_it_was_moved_in(
    database_url: str, services: Services
) -> None:
    other = services.new_database()
    clock.advance(database_url, 25 * 3600)
    unmoved = _now(other)
    assert 25 * 3600 <= _now(database_url) - unmoved < 25 * 3600 + 60
    services.drop_database(other)


def test_a_killed_service_is_back_with_its_data_after_healing(
    services: Services, database_url: str, redis_url: str
) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.set("kept", "yes")
    for name in ("postgres", "redis"):
        services.kill(name)
    services.heal()
    assert _now(database_url) > 0
    with redis.Redis.from_url(redis_url) as client:
        assert client.get("kept") == b"yes"


def test_a_frozen_postgresql_answers_nobody_whoever_has_a_connection(
    services: Services, database_url: str
) -> None:
    with psycopg.connect(database_url) as link, ThreadPoolExecutor(1) as aside:
        services.freeze("postgres")
        asked = aside.submit(link.execute, "SELECT 1")
        try:
            stays(lambda: not asked.done(), 0.5, "no answer")
        finally:
            services.thaw("postgres")
        assert asked.result(30).fetchone() == (1,)


def test_channel_and_group_exist_before_the_first_producer(environment: dict[str, str]) -> None:
    publish_nsq(environment, billing_event())
    entry = publish_redis(environment, billing_event())
    # From the topic into the channel is a way of its own.
    wait_until(lambda: health.channel_stats(environment)["depth"] == 1, 30.0, "it is there")
    with redis.Redis.from_url(environment["REDIS_URL"]) as client:
        groups = client.xinfo_groups(environment["REDIS_STREAM"])
        assert client.xlen(environment["REDIS_STREAM"]) == 1
    assert entry
    assert [group["name"] for group in groups] == [environment["REDIS_GROUP"].encode()]


def test_services_die_with_a_pytest_that_is_killed() -> None:
    script = (
        "from tests.support.services import running_services\n"
        "from tests.support.waiting import wait_until\n"
        "with running_services() as services:\n"
        "    services.need('redis', 'postgres')\n"
        "    print(*services.processes.pids().values(), flush=True)\n"
        "    wait_until(lambda: False, 60, 'the end')\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", script], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 2
    assert all(map(alive, pids))
    owner.kill()
    owner.wait()
    wait_until(lambda: not any(map(alive, pids)), GONE_WITHIN_S, "the services die")
