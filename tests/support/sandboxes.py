"""A sandbox of a test's own, driven by the command line as an operator would."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from sandbox.binaries import CHECKOUT
from sandbox.files import read_json
from sandbox.stack import Stack
from sandbox.supervisor import TICK_S
from tests.support.waiting import wait_until

COMMAND_WITHIN_S = 240.0
GONE_WITHIN_S = 30.0


class Sandbox:
    """`run("up", …)` is `python -m sandbox --directory … up …`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def run(self, *arguments: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sandbox", "--directory", str(self.directory)]
        done = subprocess.run(
            [*command, *arguments],
            check=False,
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
            timeout=COMMAND_WITHIN_S,
        )
        if ok and done.returncode != 0:
            raise AssertionError(f"{arguments} ended with {done.returncode}: {done.stderr}")
        return done

    def pids(self) -> dict[str, int]:
        return {str(k): int(v) for k, v in (read_json(self.directory / "pids.json") or {}).items()}

    def wait_replaced(self, role: str, pid: int) -> None:
        """Returns when `pids.json` has another process in the place of this one."""
        wait_until(lambda: self.pids().get(role, pid) != pid, GONE_WITHIN_S, f"another {role} runs")

    def back_after_s(self, role: str) -> list[float]:
        """How long the role was down each time it died, by the supervisor's own choice.

        At most: a tick until it looked, and the pause it made. What the machine adds is not in it.
        """
        log = (self.directory / "logs" / "supervisor.log").read_text()
        pauses = re.findall(rf" {role} ended by itself .* starts again in (\S+) s", log)
        return [TICK_S + float(pause) for pause in pauses]

    def supervisor(self) -> psutil.Process:
        for process in psutil.process_iter():
            try:
                if process.cmdline()[1:] == ["-m", "sandbox.supervisor", str(self.directory)]:
                    return process
            except psutil.Error:
                continue
        raise AssertionError("no supervisor runs")

    def kill_supervisor(self) -> None:
        process = self.supervisor()
        process.send_signal(signal.SIGKILL)
        wait_until(lambda: not alive(process.pid), GONE_WITHIN_S, "the supervisor is dead")

    def processes(self) -> list[int]:
        """Every process that belongs to the folder."""
        return Stack(self.directory).leftovers()

    def end(self) -> None:
        """Whatever state it is in: nothing is left of it."""
        with suppress(AssertionError, psutil.Error):
            self.kill_supervisor()
        for directory in (self.directory / "demo", self.directory):
            if directory.exists():
                stack = Stack(directory)
                stack.kill_leftovers()
                stack.wipe()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False
