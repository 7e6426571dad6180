"""Creates through a vault whose reply comes late or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from tests.support.stripe import Stripe
from tests.support.vault import VaultProcess, VaultReply
from tests.support.waiting import wait_until

HELD_S = 60.0
"""Longer than the vault waits for Stripe: what is held is let go by the test."""


@contextmanager
def creating(vault: VaultProcess, key: str, charge_key: str = "c1") -> Iterator[Future[VaultReply]]:
    """A create in a thread of its own; leaving the block waits for its end."""
    with ThreadPoolExecutor(1) as threads:
        yield threads.submit(vault.create, key, charge_key)


@contextmanager
def creating_held(
    vault: VaultProcess, stripe: Stripe, key: str, *charge_keys: str
) -> Iterator[list[Future[VaultReply]]]:
    """Creates that Stripe has and holds until `stripe.release()`, or the end of the block."""
    for charge_key in charge_keys:
        stripe.fault("latency", stage="after_claim", seconds=HELD_S, idempotency_key=charge_key)
    wanted = len(stripe.creates()) + len(charge_keys)
    with ThreadPoolExecutor(len(charge_keys)) as threads:
        replies = [threads.submit(vault.create, key, name) for name in charge_keys]
        try:
            wait_until(lambda: len(stripe.creates()) == wanted, 30, "Stripe has them all")
            yield replies
        finally:
            stripe.release()


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
