"""What the docs say of the code is what the code says."""

from __future__ import annotations

from pathlib import Path

from models.states import SETTLED, State
from tests.support.tables import transition_table

DOCS = Path(__file__).parents[2] / "docs"


def test_the_printed_table_of_moves_is_the_one_in_force() -> None:
    assert transition_table() in (DOCS / "states.md").read_text(encoding="utf-8")


def test_every_state_is_explained() -> None:
    text = (DOCS / "states.md").read_text(encoding="utf-8")
    for state in State:
        settled = "yes" if state in SETTLED else "no"
        assert any(
            line.startswith(f"| `{state}` |") and f"| {settled} |" in line
            for line in text.splitlines()
        ), state
