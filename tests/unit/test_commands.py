"""What holds for every command of `celery -A tasks`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points

import click
import pytest

SERVERS = {"bridge nsq", "bridge redis", "vault serve"}
"""They run until they are stopped, and print nothing."""


def leaves(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield name, command
        return
    for inner, child in command.commands.items():
        yield from leaves(child, f"{name} {inner}")


def commands() -> dict[str, click.Command]:
    groups = [
        (entry.name, entry.load())
        for entry in entry_points(group="celery.commands")
        if entry.value.partition(":")[0].partition(".")[0] in ("tasks", "bridges", "vault")
    ]
    return {name: leaf for group, made in groups for name, leaf in leaves(made, group)}


def test_the_commands_are_those_that_are_promised() -> None:
    promised = {
        *SERVERS,
        "recharge",
        "reconcile",
        *(f"ledger {name}" for name in ("show", "list", "void", "resolve", "import", "recover")),
        *(f"dead-letters {name}" for name in ("list", "show", "replay", "discard", "purge")),
        *(f"run {name}" for name in ("open", "show", "raise", "renew", "close")),
    }
    assert promised <= set(commands())


@pytest.mark.parametrize("name", sorted(set(commands()) - SERVERS))
def test_every_command_that_prints_something_can_print_json(name: str) -> None:
    options = {option for param in commands()[name].params for option in param.opts}
    assert "--json" in options
