"""What the ledger adds to a charge: bare calls to Stripe against the whole charge flow, in one run.

    python -m bench.charges [--charges N] [--threads N]

Both sides go through the same gateway to the same simulator. Figures are ratios of one run: a
slower machine moves both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from models.events import BillingEvent, event_from_json
from models.keys import charge_key
from models.ledger import boot_clock_s
from models.settings import load_settings
from sandbox import roles
from sandbox.stack import LocalKeeper, Stack
from tasks.charge import flow_of
from tasks.charge_flow import Order
from tasks.requests import build_request
from tasks.runtime import Runtime, build_runtime

READY_WITHIN_S = 60.0
DEADLINE_S = 30.0
SERVICES = ("postgres", "redis", "stripe")


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="chargebridge-bench-") as folder:
        Path(folder).chmod(0o711)
        stack = Stack(Path(folder) / "stack", limits="default", names=roles.SERVICES)
        keeper = LocalKeeper(stack)
        try:
            found = _measure(stack, keeper, options.charges, options.threads)
        finally:
            keeper.processes.kill_all()
            stack.wipe()
    print(json.dumps(found))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.charges", description=__doc__)
    parser.add_argument("--charges", type=int, default=1_000)
    parser.add_argument("--threads", type=int, default=8)
    return parser.parse_args()


def _measure(stack: Stack, keeper: LocalKeeper, charges: int, threads: int) -> dict[str, Any]:
    stack.prepare()
    for name in SERVICES:
        keeper.start_role(name)
    stack.wait_healthy(keeper, list(SERVICES), READY_WITHIN_S)
    stack.create_database("bench")
    url = stack.postgres.url("bench")
    stack.migrate({"DATABASE_URL": url})
    # One process, so that its own CPU time is the whole of our side.
    environ = {**stack.settings, "DATABASE_URL": url, "VAULT_MODE": "off", "STRIPE_RATE_PER_S": "0"}
    os.environ.update(environ)
    here = build_runtime(load_settings(environ))
    flow = flow_of(here)

    def bare(event: BillingEvent) -> None:
        _bare_call(here, event)

    def whole(event: BillingEvent) -> None:
        key = charge_key(event.customer_id, event.billing_period)
        done = flow.run(Order(key, event, "bench"), boot_clock_s() + DEADLINE_S)
        assert done == "charged", done

    for work in (bare, whole):  # warm connections and code on both sides
        _timed(work, _events("warm-" + work.__name__, threads * 4), threads)
    calls = _timed(bare, _events("bare", charges), threads)
    flows = _timed(whole, _events("whole", charges), threads)
    return {
        "charges": charges,
        "threads": threads,
        "bare_calls_per_s": round(charges / calls[0], 1),
        "charges_per_s": round(charges / flows[0], 1),
        "rate_ratio": round(calls[0] / flows[0], 3),
        "added_cpu_ms_per_charge": round((flows[1] - calls[1]) / charges * 1000, 2),
        "cpu_ratio": round(flows[1] / calls[1], 3),
    }


def _bare_call(here: Runtime, event: BillingEvent) -> None:
    request = build_request(
        event,
        charge_key(event.customer_id, event.billing_period),
        epoch=0,
        payment_method=event.payment_method,
        key_id="bench",
        namespace=here.settings.charge_namespace,
        endpoint="payment_intents",
    )
    reply = here.gateway.create(request, boot_clock_s() + DEADLINE_S, lambda: None)
    assert reply.http_status == 200, reply


def _events(tag: str, count: int) -> list[BillingEvent]:
    return [
        event_from_json(
            {
                "customer_id": f"{tag}-{number}",
                "billing_period": "bench",
                "amount_cents": 1_000,
                "stripe_customer_id": f"cus_{tag.replace('-', '')}{number}",
                "payment_method": "pm_card_visa",
            }
        )
        for number in range(count)
    ]


def _timed(
    work: Callable[[BillingEvent], None], events: list[BillingEvent], threads: int
) -> tuple[float, float]:
    """Wall seconds and CPU seconds of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(work, events):
            pass
    return time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    sys.exit(main())
