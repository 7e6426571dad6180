"""The page on the vault names every refusal, setting and metric that there is."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from models.settings import Settings
from vault.answers import REFUSALS
from vault.metrics import Metrics
from vault.verdicts import HoldState

TEXT = (Path(__file__).parents[2] / "docs" / "vault.md").read_text(encoding="utf-8")


def test_every_refusal_stands_there_with_its_status() -> None:
    for code, (status, _) in REFUSALS.items():
        assert f"| `{code}` | {status} |" in TEXT, code


def test_every_state_of_a_hold_is_explained() -> None:
    for state in HoldState:
        assert f"| `{state}` |" in TEXT


def test_every_setting_of_the_vault_is_named() -> None:
    names = [item.name.upper() for item in fields(Settings) if item.name.startswith("vault_")]
    for name in [*names, "RUN_AUTO_OPEN_EXPECTED_CENTS"]:
        assert f"`{name}`" in TEXT, name


def test_every_metric_is_named() -> None:
    page = Metrics().page().decode()
    for line in page.splitlines():
        if line.startswith("# TYPE ") and not line.endswith("_created gauge"):
            assert f"`{line.split()[2]}" in TEXT, line
