"""`.sandbox/env`: the settings of a running stack, for a shell to source."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from sandbox.files import write_atomically

HEADER = "# Settings of the running sandbox (Stripe is simulated): set -a; . FILE; set +a\n"


def env_text(settings: Mapping[str, str]) -> str:
    lines = [f"{name}={shlex.quote(value)}\n" for name, value in settings.items()]
    return HEADER + "".join(lines)


def write_env(path: Path, settings: Mapping[str, str]) -> None:
    """Atomically; readable by its owner only, since it holds passwords."""
    write_atomically(path, env_text(settings), mode=0o600)


def read_env(path: Path) -> dict[str, str]:
    """What `write_env` wrote."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    pairs = [shlex.split(line)[0].partition("=") for line in lines]
    return {name: value for name, _, value in pairs}
