"""Named fault points: what holds a process, and what lets it go."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from models import faults
from tests.support.faults import FaultPoints

POINT = "test.point"


@pytest.fixture
def points(tmp_path: Path) -> Iterator[FaultPoints]:
    made = FaultPoints(tmp_path)
    faults.enable(str(tmp_path))
    yield made
    faults.enable(None)


def test_who_is_held_goes_on_although_another_is_held_there_by_now(points: FaultPoints) -> None:
    points(POINT, "hold")
    held = threading.Thread(target=faults.fault_point, args=(POINT,), daemon=True)
    held.start()
    points.wait_reached(POINT)
    later = points.folder / "later"
    later.write_text("hold 1")
    later.rename(points.folder / f"{POINT}.reached")
    held.join(30)
    assert not held.is_alive()
    assert points.reached(POINT)
