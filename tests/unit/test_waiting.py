"""What tests wait by."""

from __future__ import annotations

import pytest

from tests.support.waiting import NeverHappenedError, stays, wait_until


def test_what_never_comes_fails_the_wait() -> None:
    with pytest.raises(NeverHappenedError, match="not within 0 s: rain"):
        wait_until(lambda: False, 0, "rain")


def test_what_must_stay_is_looked_at_however_late() -> None:
    with pytest.raises(AssertionError, match="did not stay so for 0 s: dry"):
        stays(lambda: False, 0, "dry")
    stays(lambda: True, 0, "dry")
