"""Named places where a test can kill, freeze or hold a process. Does nothing unless armed.

Arming is a file in the folder that the setting FAULTS_DIR names: the file's name is the
point's, its text the action (`kill`, `freeze`, `hold`). The file is taken away before the
action, so each arming fires once, in whichever process comes by first; what is left,
`NAME.reached`, says which one that was.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

HOLD_POLL_S = 0.01

_folder: Path | None = None


def enable(folder: str | None) -> None:
    """Look for armed points in this folder from now on (None: never)."""
    global _folder  # noqa: PLW0603 - one switch for the process, thrown once at its start
    _folder = Path(folder) if folder else None


def enabled() -> bool:
    """Whether points can be armed at all in this process."""
    return _folder is not None


def fault_point(name: str) -> None:
    """Stand at a named step; act if a test armed it, else return at once."""
    if _folder is None:
        return
    armed = _folder / name
    taken = _folder / f"{name}.taken.{os.getpid()}.{threading.get_ident()}"
    try:
        armed.rename(taken)
    except OSError:
        return
    action = taken.read_text(encoding="utf-8").strip()
    taken.write_text(f"{action} {os.getpid()}", encoding="utf-8")
    reached = _folder / f"{name}.reached"
    with taken.open(encoding="utf-8") as mark:
        taken.rename(reached)
        _act(action, reached, os.fstat(mark.fileno()))


def _act(action: str, reached: Path, mark: os.stat_result) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "freeze":
        # To this thread: by os.kill the first thread may take it, and this one runs on meanwhile.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    elif action == "hold":
        _hold(reached, mark)


def _hold(reached: Path, mark: os.stat_result) -> None:
    """Wait here until the test takes this very marker file away; a later one is another's."""
    pause = threading.Event()
    while _is_there(reached, mark):
        pause.wait(HOLD_POLL_S)


def _is_there(reached: Path, mark: os.stat_result) -> bool:
    try:
        return os.path.samestat(reached.stat(), mark)
    except FileNotFoundError:
        return False
