"""A simulator for the tests of one module, forgetting everything before each of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.stripe_simulator.simulator import Simulator, running_simulator


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulator]:
    with running_simulator(tmp_path_factory.mktemp("simulator")) as simulator:
        yield simulator


@pytest.fixture
def stripe(process: Simulator) -> Simulator:
    process.reset()
    return process
