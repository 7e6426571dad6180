"""Runs `celery -A tasks …` as an operator does."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sandbox import roles
from sandbox.binaries import CHECKOUT

WITHIN_S = 60.0


class Commands:
    """`run("ledger", "show", …)` against one environment."""

    def __init__(self, environment: Mapping[str, str], home: Path) -> None:
        self.environment = {**roles.base_environment(home), **environment}

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        """Starts one and does not wait for it."""
        return subprocess.Popen(
            roles.celery(*arguments),
            env={**self.environment, **env},
            cwd=CHECKOUT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Exit code and output of one command."""
        started = self.start(*arguments, **env)
        out, err = started.communicate(timeout=WITHIN_S)
        return subprocess.CompletedProcess(arguments, started.returncode, out, err)

    def done(self, *arguments: str, **env: str) -> str:
        """The output of a command that must succeed."""
        ended = self.run(*arguments, **env)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def json(self, *arguments: str, **env: str) -> Any:
        return json.loads(self.done(*arguments, "--json", **env))

    def refused(self, *arguments: str, **env: str) -> str:
        """The one line of a command that must be refused."""
        ended = self.run(*arguments, **env)
        assert ended.returncode == 1, (ended.returncode, ended.stdout, ended.stderr)
        lines = ended.stderr.strip().splitlines()
        assert len(lines) == 1, ended.stderr
        assert lines[0].startswith("chargebridge: "), lines
        return lines[0].removeprefix("chargebridge: ")
