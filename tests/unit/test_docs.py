"""What the docs say of the code is what the code says."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from models.limits import FAST_LIMITS, Limits
from models.settings import Settings
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


def test_every_setting_and_limit_is_in_the_docs_with_its_default() -> None:
    text = (DOCS / "settings.md").read_text(encoding="utf-8")
    for item in fields(Settings):
        if item.name not in ("limits", "warnings"):
            assert f"`{item.name.upper()}`" in text
    for item in fields(Limits):
        default, fast = (int(getattr(limits, item.name)) for limits in (Limits(), FAST_LIMITS))
        assert f"| `{item.name.upper()}` | {default} | {fast} |" in text
