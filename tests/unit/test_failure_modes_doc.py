"""docs/failure-modes.md names only tests that exist, and leaves out no failure mode."""

from __future__ import annotations

import re
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
PAGE = (CHECKOUT / "docs" / "failure-modes.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
MODES = [
    *("N1", "N2", "N3", "N3b", "N4", "N5", "N6", "N7", "N8", "N9"),
    *("R1", "R2", "R3", "R4", "R5", "R6"),
    *("S1", "S2", "S3", "S4", "S5"),
]


def test_every_test_that_is_named_exists() -> None:
    named = NAMED.findall(PAGE)
    assert named
    missing = [
        f"{file}::{name}"
        for file, name in named
        if f"\ndef {name}(" not in (CHECKOUT / file).read_text(encoding="utf-8")
    ]
    assert missing == []


def test_every_failure_mode_is_explained_or_said_not_to_be_covered() -> None:
    shown, _, not_covered = PAGE.partition("## Not covered")
    explained = re.findall(r"^\| (\w+) \| .+ \| .+ \| .+ \|$", shown, re.MULTILINE)
    open_ends = re.findall(r"^- (\w+):", not_covered, re.MULTILINE)
    assert sorted({*explained, *open_ends} - {"id"}) == sorted(MODES)
    assert not set(explained) & set(open_ends)


def test_every_failure_mode_has_a_test_of_its_name() -> None:
    for line in PAGE.splitlines():
        found = re.match(r"\| ([NRS]\d\w?) \|", line)
        if found and found[1] != "R4":
            assert f"::test_{found[1].lower()}_" in line, found[1]
