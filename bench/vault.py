"""What the vault adds to a call: direct against through it, in one run, on one machine.

    python -m bench.vault [--calls N] [--rate N] [--memory-calls N] [--holds N]

Stripe is a small stub here, since the question is the vault's own cost. Paced calls give what is
added to a call; unpaced ones give how many one core forwards. Figures are ratios and differences
of one run: a slower machine moves both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import urllib3
from sqlalchemy import text

from models.database import make_engine
from models.settings import load_settings
from sandbox.ports import free_port
from sandbox.processes import Processes
from sandbox.stack import LocalKeeper, Stack
from tests.support.vault import ADMIN_KEY, RUN, VaultProcess, create_fields

CLIENTS = 32
UPSTREAM_PAUSE_S = 0.02
KEY_OF_THE_STUB = "sk_test_stub"


# -- Stripe, as little of it as will do ------------------------------------------------------


class _Stub(asyncio.Protocol):
    """Answers every request with a paid intent after a pause, as Stripe does after a longer one."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n")[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            self._buffer = self._buffer[end + 4 + length :]
            asyncio.get_running_loop().call_later(UPSTREAM_PAUSE_S, self._answer)

    def _answer(self) -> None:
        body = json.dumps(
            {
                "id": f"pi_{time.monotonic_ns()}",
                "object": "payment_intent",
                "status": "succeeded",
                "latest_charge": "ch_1",
                "padding": "x" * 1500,
            }
        ).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        self._transport.write(f"{head}\r\nRequest-Id: req_1\r\n\r\n".encode() + body)  # type: ignore[attr-defined]


def _stub(port: int) -> None:
    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(_Stub, "127.0.0.1", port)
        await server.serve_forever()

    asyncio.run(serve())


# -- clients ---------------------------------------------------------------------------------


class Load:
    """Creates from 32 clients, each with its own connection, at a given rate or as they can."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._headers = {
            "Authorization": f"Bearer {key}",
            "Content-Type": "application/x-www-form-urlencoded",
        }
        self._http = urllib3.PoolManager(maxsize=CLIENTS, retries=False, timeout=60)

    def run(self, calls: int, rate: float | None, prefix: str) -> tuple[list[float], float]:
        """Latencies in seconds, and how long all of it took."""
        latencies: list[float] = []
        lock = threading.Lock()
        numbers = iter(range(calls))
        began_s = time.perf_counter()

        def client() -> None:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                if rate is not None:
                    wait_s = began_s + number / rate - time.perf_counter()
                    if wait_s > 0:
                        time.sleep(wait_s)
                latency_s = self._call(f"{prefix}{number}")
                with lock:
                    latencies.append(latency_s)

        with ThreadPoolExecutor(CLIENTS) as threads:
            for done in [threads.submit(client) for _ in range(CLIENTS)]:
                done.result()
        return latencies, time.perf_counter() - began_s

    def _call(self, charge_key: str) -> float:
        fields = create_fields(charge_key)
        began_s = time.perf_counter()
        reply = self._http.request_encode_body(
            "POST",
            f"{self._url}/v1/payment_intents",
            fields=fields,
            encode_multipart=False,
            headers={**self._headers, "Idempotency-Key": charge_key},
        )
        if reply.status != 200:
            raise RuntimeError(f"a call came to {reply.status}: {reply.data!r}")
        return time.perf_counter() - began_s


# -- the measurement -------------------------------------------------------------------------


class Bench:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.stack = Stack(folder / "stack", limits="fast", names=("postgres",))
        self.stack.prepare()
        self.keeper = LocalKeeper(self.stack)
        self.keeper.start_role("postgres")
        self.stack.wait_healthy(self.keeper, ["postgres"], 30)
        self.stack.create_database("bench")
        self.url = self.stack.postgres.url("bench")
        self.stack.migrate({"DATABASE_URL": self.url})
        self.engine = make_engine(load_settings({"DATABASE_URL": self.url}), name="bench")
        port = free_port()
        self.stub_url = f"http://127.0.0.1:{port}"
        self._stub = multiprocessing.Process(target=_stub, args=(port,), daemon=True)
        self._stub.start()
        self.vault = self._start_vault()

    def _start_vault(self) -> VaultProcess:
        env = {
            "DATABASE_URL": self.url,
            "STRIPE_API_BASE": self.stub_url,
            "STRIPE_API_KEY": KEY_OF_THE_STUB,
            "VAULT_ADMIN_KEY": ADMIN_KEY,
            "VAULT_LISTEN": f"127.0.0.1:{free_port()}",
            "LIMITS": "fast",
        }
        return VaultProcess(Processes(self._folder), self._folder, "vault", env).start()

    def close(self) -> None:
        self.vault.kill()
        self._stub.kill()
        self.engine.dispose()
        self.keeper.processes.kill_all()
        self.stack.wipe()

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.vault.pid)

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def added(self, calls: int, rate: float) -> dict[str, Any]:
        """Direct and through the vault at the same pace: what one call gains in time and CPU."""
        key = self.vault.issue(cap_cents=2**60)
        direct, through = Load(self.stub_url, "sk"), Load(f"{self.vault.url}/stripe", key)
        through.run(200, rate, "warm-")
        direct_s, _ = direct.run(calls, rate, "d")
        before = self.cpu_s()
        through_s, _ = through.run(calls, rate, "t")
        cpu_s = self.cpu_s() - before
        medians = statistics.median(direct_s), statistics.median(through_s)
        return {
            "rate_per_s": rate,
            "direct_median_ms": _ms(medians[0]),
            "through_median_ms": _ms(medians[1]),
            "ratio": round(medians[1] / medians[0], 3),
            "added_median_ms": _ms(medians[1] - medians[0]),
            "added_p95_ms": _ms(_p95(through_s) - _p95(direct_s)),
            "vault_cpu_ms_a_call": _ms(cpu_s / calls),
        }

    def throughput(self, calls: int) -> dict[str, Any]:
        """As fast as it goes with the vault on one core."""
        key = self.vault.issue(cap_cents=2**60)
        load = Load(f"{self.vault.url}/stripe", key)
        cores = sorted(os.sched_getaffinity(0))
        for thread in self.process.threads():
            os.sched_setaffinity(thread.id, cores[:1])
        before = self.cpu_s()
        _, took_s = load.run(calls, None, "f")
        cpu_s = self.cpu_s() - before
        for thread in self.process.threads():
            os.sched_setaffinity(thread.id, cores)
        return {
            "calls_per_s": round(calls / took_s, 1),
            "calls_per_s_of_vault_cpu": round(calls / cpu_s, 1),
        }

    def memory(self, calls: int) -> dict[str, Any]:
        """Resident memory after a tenth of the calls and after all."""
        load = Load(f"{self.vault.url}/stripe", self.vault.issue(cap_cents=2**60))
        load.run(calls // 10, None, "m-first-")
        early = self.process.memory_info().rss
        load.run(calls - calls // 10, None, "m-rest-")
        late = self.process.memory_info().rss
        return {"calls": calls, "rss_mb": [_mb(early), _mb(late)], "ratio": round(late / early, 3)}

    def growth(self, holds: int) -> dict[str, Any]:
        """Time to take a hold with few and with many in the table."""
        load = Load(f"{self.vault.url}/stripe", self.vault.issue(cap_cents=2**60))
        few_s, _ = load.run(1000, 50, "g-few-")
        self._fill(holds)
        load.run(200, 50, "g-warm-")
        many_s, _ = load.run(1000, 50, "g-many-")
        few, many = statistics.median(few_s), statistics.median(many_s)
        return {
            "holds": holds,
            "median_ms": [_ms(few), _ms(many)],
            "ratio": round(many / few, 3),
        }

    def _fill(self, holds: int) -> None:
        fill = text(
            """INSERT INTO vault_holds (run_id, idempotency_key, charge_key, attempt_epoch,
                   endpoint, amount_cents, state, upstream_key_id, first_sent_at, last_sent_at)
               SELECT (SELECT id FROM billing_runs WHERE billing_run = :run), md5(n::text),
                   md5(n::text), 0, 'payment_intents', 1, 'settled', 'x', now(), now()
               FROM generate_series(:first, :last) n"""
        )
        step = 50_000
        with self.engine.connect() as connection:
            for first in range(0, holds, step):
                last = min(first + step, holds) - 1
                connection.execute(fill, {"run": RUN, "first": first, "last": last})
            connection.execute(text("ANALYZE vault_holds"))


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)


def _mb(size: int) -> float:
    return round(size / 2**20, 1)


def _p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="chargebridge-bench-") as name:
        folder = Path(name)
        folder.chmod(0o711)
        bench = Bench(folder)
        try:
            parts: list[tuple[str, Callable[[], dict[str, Any]]]] = [
                ("added", lambda: bench.added(arguments.calls, arguments.rate)),
                ("one_core", lambda: bench.throughput(arguments.calls)),
            ]
            if arguments.memory_calls:
                parts.append(("memory", lambda: bench.memory(arguments.memory_calls)))
            if arguments.holds:
                parts.append(("growth", lambda: bench.growth(arguments.holds)))
            result = {"clients": CLIENTS, "calls": arguments.calls}
            for part, run in parts:
                result[part] = run()
                print(f"{part}: {json.dumps(result[part])}", file=sys.stderr, flush=True)
            return result
        finally:
            bench.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.vault", description=__doc__)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--rate", type=float, default=100, help="calls a second, paced")
    parser.add_argument("--memory-calls", type=int, default=0, help="100000 for the whole test")
    parser.add_argument("--holds", type=int, default=0, help="1000000 for the whole test")
    print(json.dumps(measure(parser.parse_args()), indent=2))


if __name__ == "__main__":
    main()
