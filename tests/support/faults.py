"""Arms named fault points in the processes of a test (see models/faults.py)."""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.support.waiting import wait_until


class FaultPoints:
    """`fault_point("worker.after_call", "kill")`; the next process that comes by acts once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def __call__(self, name: str, action: str) -> None:
        """`action`: kill (SIGKILL itself), freeze (SIGSTOP itself), hold (wait for release)."""
        temporary = self.folder / f".{name}.new"
        temporary.write_text(action)
        temporary.rename(self.folder / name)

    def reached(self, name: str) -> bool:
        return (self.folder / f"{name}.reached").exists()

    def wait_reached(self, name: str, timeout_s: float = 30.0) -> None:
        """Returns when a process stands there; one that freezes is frozen by then."""
        wait_until(lambda: self.reached(name), timeout_s, f"a process comes to {name}")
        action, pid = (self.folder / f"{name}.reached").read_text().split()
        if action == "freeze":
            process = psutil.Process(int(pid))
            stopped = psutil.STATUS_STOPPED
            wait_until(lambda: process.status() == stopped, timeout_s, f"it is frozen at {name}")

    def release(self, name: str) -> None:
        """Lets a held process go on, and makes the point fresh for another arming."""
        (self.folder / f"{name}.reached").unlink(missing_ok=True)
