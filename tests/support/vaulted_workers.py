"""Workers that have no key of Stripe's own and charge through the vault, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy.engine import Engine

from models.billing_runs import BillingRuns
from tests.support.flows import Worker
from tests.support.stripe import Stripe
from tests.support.vault import RUN, Books, VaultProcess, vaulted_settings

EXPECTED = 10_000
CAP = 11_000
AMOUNT = 2_500
MakeWorker = Callable[..., Worker]


@pytest.fixture
def make_vaulted_worker(
    environment: dict[str, str], stripe: Stripe, vault: VaultProcess
) -> Iterator[MakeWorker]:
    """Workers that have no key of Stripe's own."""
    made: list[Worker] = []

    def make(**env: str) -> Worker:
        made.append(Worker(environment, stripe, **vaulted_settings(vault, **env)))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


@pytest.fixture
def runs(engine: Engine) -> BillingRuns:
    return BillingRuns(engine, "test")


@pytest.fixture
def vaulted_worker(make_vaulted_worker: MakeWorker, runs: BillingRuns) -> Worker:
    """A worker, and the run open."""
    runs.open(RUN, "usd", EXPECTED)
    return make_vaulted_worker()


def charge(worker: Worker, customer: str, **fields: Any) -> str:
    return worker.charge(customer, billing_run=RUN, **fields)


def later(worker: Worker, customer: str, seconds: float = 10) -> str:
    worker.pass_time(seconds)
    return worker.drive(customer)


def budget(books: Books) -> tuple[int, int]:
    found = books.budget()
    return found["settled_cents"], found["held_cents"]
