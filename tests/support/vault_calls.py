"""Creates through a vault whose reply comes late or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from tests.support.stripe import Stripe
from tests.support.vault import VaultProcess, VaultReply
from tests.support.waiting import wait_until


@contextmanager
def creating(vault: VaultProcess, key: str, charge_key: str = "c1") -> Iterator[Future[VaultReply]]:
    """A create in a thread of its own; leaving the block waits for its end."""
    with ThreadPoolExecutor(1) as threads:
        yield threads.submit(vault.create, key, charge_key)


@contextmanager
def creating_slowly(vault: VaultProcess, stripe: Stripe, key: str) -> Iterator[Future[VaultReply]]:
    """A create of "c1" that Stripe has and takes its time for."""
    stripe.fault("latency", stage="after_claim", seconds=2, idempotency_key="c1")
    with creating(vault, key) as reply:
        wait_until(stripe.creates, 10, "Stripe has the request")
        yield reply


def create_unheard(
    vault: VaultProcess,
    stripe: Stripe,
    key: str,
    charge_key: str = "c1",
    *,
    stage: str = "after_commit",
) -> VaultReply:
    """A create that Stripe breaks off; at the stage "after_commit" the money is taken."""
    stripe.fault("reset", stage=stage, idempotency_key=charge_key)
    return vault.create(key, charge_key)
