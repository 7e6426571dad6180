"""What the ledger adds to a delivery: a bridge against a raw consumer, in one run.

    python -m bench.bridges [--repeats N] [--events N] [--waiting N] [--json FILE]

A storm of settled repeats is drained by a bare consumer, which reads and acks and does nothing
else, one ack for each message, and by our bridge, which looks each one up in the ledger before;
for the stream also by one that acks 200 entries with one command, which no consumer that handles
messages one by one can reach, but shows where the limit is. Then events are settled at
a steady pace, to see how long after the commit their acks are sent. `--waiting` also measures the
bridge's memory while so many events wait at the broker. Ratios are of one run: a slower machine
moves both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import redis

from bridges.delivery import Delivery
from models.database import make_engine
from models.events import event_from_json
from models.ledger import Ledger, Retry
from models.settings import load_settings
from sandbox import health, roles
from sandbox.demo import publish_nsq, publish_redis
from sandbox.processes import Processes, RoleSpec
from sandbox.stack import LocalKeeper, Stack, create_channel, create_group
from tests.support.bridges import RunningBridge
from tests.support.ledgers import claimed, new_record, outcome
from tests.support.producers import billing_event
from tests.support.waiting import wait_until

READY_WITHIN_S = 60.0
DRAINED_WITHIN_S = 600.0
SERVICES = ("postgres", "redis", "nsqlookupd", "nsqd")
NSQD = ("--sync-every=2500", "--mem-queue-size=1000000")
"""The sandbox's own nsqd syncs every message: then the disk would be measured."""
DISTINCT = 1_000
"""Different events among the repeats."""
BATCH = 1_000
IN_FLIGHT = 200
"""For both sides."""
PACE_PER_S = 100
CHARGED_AFTER = 50
"""Events that are published before the outcome of one is committed: half a second."""
MEMORY_AFTER_S = 20.0
PUBLISH = {"nsq": publish_nsq, "redis": publish_redis}

Settings = dict[str, str]


def main() -> int:
    options = _options()
    if options.raw:
        RAW[options.raw]()
        return 0
    with tempfile.TemporaryDirectory(prefix="chargebridge-bench-") as folder:
        Path(folder).chmod(0o711)
        stack = Stack(Path(folder) / "stack", limits="default", names=roles.SERVICES)
        keeper = LocalKeeper(stack)
        try:
            found = _measure(stack, keeper, Path(folder), options)
        finally:
            keeper.processes.kill_all()
            stack.wipe()
    text = json.dumps(found)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.bridges", description=__doc__)
    parser.add_argument("--repeats", type=int, default=50_000)
    parser.add_argument("--events", type=int, default=1_000, help="settled at a steady pace")
    parser.add_argument("--waiting", type=int, default=0, help="events while memory is measured")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--raw", choices=sorted(RAW), help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure(
    stack: Stack, keeper: LocalKeeper, folder: Path, options: argparse.Namespace
) -> dict[str, Any]:
    stack.prepare()
    for name in SERVICES:
        if name != "nsqd":
            keeper.start_role(name)
    place = roles.Place(folder / "own", roles.base_environment(folder / "home"))
    keeper.processes.start(roles.nsqd(place, stack.ports, NSQD))
    stack.wait_healthy(keeper, list(SERVICES), READY_WITHIN_S)
    stack.create_database("bench")
    database_url = stack.postgres.url("bench")
    stack.migrate({"DATABASE_URL": database_url})
    told = {
        **stack.settings,
        "DATABASE_URL": database_url,
        "VAULT_MODE": "off",
        "BRIDGE_MAX_IN_FLIGHT": str(IN_FLIGHT),
    }
    settings = load_settings(told)
    engine = make_engine(settings, pool_size=4, name="bench")
    ledger = Ledger(engine, settings.limits, "bench")
    bodies = [_settled(ledger, number) for number in range(DISTINCT)]
    processes = Processes(folder)
    found: dict[str, Any] = {"repeats": options.repeats, "in_flight": IN_FLIGHT}
    for kind in ("nsq", "redis"):
        bench = _Bench(kind, told, processes, folder)
        raw = bench.storm("raw", bodies, options.repeats)
        ours = bench.storm("bridge", bodies, options.repeats)
        delays = bench.commit_to_ack(ledger, options.events)
        found[kind] = {
            "raw_per_s": round(options.repeats / raw, 1),
            "bridge_per_s": round(options.repeats / ours, 1),
            "rate_ratio": round(raw / ours, 3),
            "commit_to_ack_ms": {
                "median": _percentile_ms(delays, 0.5),
                "p99": _percentile_ms(delays, 0.99),
            },
        }
        if kind == "redis":
            batched = bench.storm("batched", bodies, options.repeats)
            found[kind]["raw_batched_ack_per_s"] = round(options.repeats / batched, 1)
            found[kind]["batched_ack_rate_ratio"] = round(batched / ours, 3)
        if options.waiting:
            found[kind]["memory_mib"] = bench.memory_mib(options.waiting)
    engine.dispose()
    return found


def _settled(ledger: Ledger, number: int) -> bytes:
    event = billing_event(f"bench_{number}", "bench")
    claim = claimed(ledger, new_record(event_from_json(event)))
    ledger.record_outcome(claim, outcome(), Retry(1))
    return json.dumps(event).encode()


def _percentile_ms(delays_s: Sequence[float], share: float) -> float:
    ordered = sorted(delays_s)
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)


class _Bench:
    """One broker; each measurement has a topic or stream of its own."""

    def __init__(self, kind: str, told: Settings, processes: Processes, folder: Path) -> None:
        self._kind = kind
        self._told = told
        self._processes = processes
        self._folder = folder

    def _place(self, name: str) -> Settings:
        settings = {
            **self._told,
            "NSQ_TOPIC": f"bench-{name}",
            "REDIS_STREAM": f"bench-{name}",
        }
        if self._kind == "nsq":
            create_channel(settings)
        else:
            create_group(settings)
        return settings

    def _fill(self, settings: Settings, bodies: Sequence[bytes], count: int) -> None:
        for start in range(0, count, BATCH):
            batch = [bodies[n % len(bodies)] for n in range(start, min(count, start + BATCH))]
            PUBLISH[self._kind](settings, batch)

    def storm(self, who: str, bodies: Sequence[bytes], count: int) -> float:
        """Seconds from the first delivery to the last ack."""
        settings = self._place(f"storm-{who}")
        self._fill(settings, bodies, count)
        with self._consumer(who, settings):
            wait_until(lambda: self._left(settings) != (count, 0), READY_WITHIN_S, "it begins")
            begun = time.perf_counter()
            wait_until(lambda: self._left(settings) == (0, 0), DRAINED_WITHIN_S, "all acked")
            return time.perf_counter() - begun

    def _left(self, settings: Settings) -> tuple[int, int]:
        """Not yet delivered (for a stream: 0, or any other number), and not yet acked."""
        if self._kind == "nsq":
            channel = health.channel_stats(settings)
            return channel["depth"], channel["in_flight_count"] + channel["deferred_count"]
        stream = settings["REDIS_STREAM"]
        with redis.Redis.from_url(settings["REDIS_URL"]) as client:
            (group,) = client.xinfo_groups(stream)
            last = client.xinfo_stream(stream)["last-generated-id"]
            length = client.xlen(stream)
        if group["last-delivered-id"] == b"0-0":
            return length, 0
        return int(group["last-delivered-id"] != last), group["pending"]

    @contextmanager
    def _consumer(self, who: str, settings: Settings) -> Iterator[psutil.Process]:
        place = roles.Place(self._folder / who, roles.base_environment(self._folder / "home"))
        spec = roles.bridge(place, settings, self._kind, name=f"{who}-{self._kind}")
        if who not in {"bridge", "waiting"}:
            raw = self._kind if who == "raw" else f"{self._kind}-{who}"
            command = (sys.executable, "-m", "bench.bridges", "--raw", raw)
            spec = RoleSpec(**{**vars(spec), "command": command})
        pid = self._processes.start(spec)
        try:
            yield psutil.Process(pid)
        finally:
            self._processes.kill(spec.name)
            self._processes.forget(spec.name)

    def commit_to_ack(self, ledger: Ledger, count: int) -> list[float]:
        """Seconds from each commit to the ack that followed it, at a steady pace."""
        settings = self._place("pace")
        told = load_settings({**settings, "PARK_AFTER_S": "3600"})
        events = [billing_event(f"pace_{self._kind}_{n}", "bench") for n in range(count)]
        claims = [claimed(ledger, new_record(event_from_json(event))) for event in events]
        committed: dict[str, float] = {}
        acked: dict[str, float] = {}
        with RunningBridge(told, self._kind) as running:
            running.call(lambda bridge: _note_acks(bridge.source, acked))
            begun = time.perf_counter()
            for number in range(count + CHARGED_AFTER):
                due = begun + number / PACE_PER_S
                while time.perf_counter() < due:
                    time.sleep(0.001)
                if number < count:
                    self._fill(settings, [json.dumps(events[number]).encode()], 1)
                if number >= CHARGED_AFTER:
                    first = number - CHARGED_AFTER
                    ledger.record_outcome(claims[first], outcome(), Retry(1))
                    committed[events[first]["customer_id"]] = time.perf_counter()
            running.wait_count("acked", count, READY_WITHIN_S)
        # An ack can even be sent before the commit's own answer has been read here.
        return [max(0.0, acked[customer] - at) for customer, at in committed.items()]

    def memory_mib(self, waiting: int) -> float:
        """The bridge's memory while so many events wait and the workers take none."""
        settings = self._place("waiting")
        settings["BRIDGE_MAX_QUEUE_DEPTH"] = "1"
        bodies = [
            json.dumps(billing_event(f"waiting_{n}", "bench")).encode() for n in range(DISTINCT)
        ]
        self._fill(settings, bodies, waiting)
        with self._consumer("waiting", settings) as process:
            wait_until(lambda: self._left(settings)[1] > 0, READY_WITHIN_S, "it has some")
            time.sleep(MEMORY_AFTER_S)
            return round(process.memory_info().rss / 2**20, 1)


def _note_acks(source: Any, acked: dict[str, float]) -> None:
    """Have the source write down when it acked what."""
    ack = source.ack

    async def noted(deliveries: Sequence[Delivery]) -> None:
        await ack(deliveries)
        now = time.perf_counter()
        acked.update((json.loads(d.body)["customer_id"], now) for d in deliveries)

    source.ack = noted


# -- consumers that know no ledger ---------------------------------------------------------------


def _raw_nsq() -> None:
    import nsq  # noqa: PLC0415 - the bare consumer's only

    settings = load_settings()

    def finish(message: Any) -> bool:
        return True  # pynsq sends FIN

    async def run() -> None:
        nsq.Reader(
            message_handler=finish,
            topic=settings.nsq_topic,
            channel=settings.nsq_channel,
            nsqd_tcp_addresses=[settings.nsqd_tcp_address],
            max_in_flight=IN_FLIGHT,
            output_buffer_timeout=25,
        )
        await asyncio.Event().wait()

    asyncio.run(run())


def _raw_redis(at_once: int = 1) -> None:
    settings = load_settings()
    stream, group = settings.redis_stream, settings.redis_group
    with redis.Redis.from_url(settings.redis_url, protocol=2) as client:
        while True:
            reply: Any = client.xreadgroup(group, "raw", {stream: ">"}, count=IN_FLIGHT, block=500)
            for _stream, entries in reply or ():
                ids = [entry_id for entry_id, _fields in entries]
                for first in range(0, len(ids), at_once):
                    client.xack(stream, group, *ids[first : first + at_once])


RAW: dict[str, Callable[[], None]] = {
    "nsq": _raw_nsq,
    "redis": _raw_redis,
    "redis-batched": partial(_raw_redis, IN_FLIGHT),
}


if __name__ == "__main__":
    sys.exit(main())
