"""How a command talks to the supervisor: one JSON line each way over a socket in the folder.

The socket is reached through an open folder (`/proc/self/fd/N/…`): a deep checkout path would
not fit into a socket address.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sandbox.processes import SandboxError

SOCKET = "control.sock"
LOCK = "supervisor.lock"
TIMEOUT_S = 5.0
TRIES = 3
"""The supervisor waits a second for a request: who was held up for longer asks again, which is
safe with all that it can be asked for."""
POLL_S = 0.05


@contextmanager
def _short_path(directory: Path) -> Iterator[str]:
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{SOCKET}"
    finally:
        os.close(folder)


def listen(directory: Path) -> socket.socket:
    """The supervisor's end; a socket file that a killed one left is replaced."""
    (directory / SOCKET).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    with _short_path(directory) as path:
        listener.bind(path)
    os.chmod(directory / SOCKET, 0o600)
    listener.listen()
    return listener


def supervisor_runs(directory: Path) -> bool:
    """Exactly while it lives: the kernel drops the lock with the process."""
    return supervisor_pid(directory) is not None


def supervisor_pid(directory: Path) -> int | None:
    """The pid in the lock file, which is the holder's for as long as the lock is held."""
    try:
        lock = (directory / LOCK).open()
    except FileNotFoundError:
        return None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(lock.read() or 0)
    return None


def kill_supervisor(directory: Path) -> None:
    """SIGKILL to one that does not answer any more; its roles die with it."""
    pid = supervisor_pid(directory)
    if pid:
        os.kill(pid, signal.SIGKILL)
    _wait_until_gone(directory, TIMEOUT_S)


def _wait_until_gone(directory: Path, timeout_s: float) -> None:
    pause = threading.Event()
    deadline = time.monotonic() + timeout_s
    while supervisor_runs(directory):
        if time.monotonic() > deadline:
            raise SandboxError("the supervisor did not end in time")
        pause.wait(POLL_S)


def ask(directory: Path, request: dict[str, Any]) -> dict[str, Any]:
    """One question, one answer. Raises SandboxError with the supervisor's refusal."""
    for _ in range(TRIES):
        if answer := _exchange(directory, json.dumps(request).encode() + b"\n"):
            break
    else:
        raise SandboxError("the supervisor went away")
    reply: dict[str, Any] = json.loads(answer)
    if "error" in reply:
        raise SandboxError(str(reply["error"]))
    return reply


def _exchange(directory: Path, request: bytes) -> bytes:
    """The answer; empty where the supervisor gave up waiting for the request."""
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(TIMEOUT_S)
            with _short_path(directory) as path:
                link.connect(path)
            with suppress(BrokenPipeError, ConnectionResetError):
                link.sendall(request)
                return link.makefile("rb").readline()
            return b""
    except (TimeoutError, BlockingIOError) as error:
        # The second when others wait already, and the queue of the socket is full.
        raise SandboxError(
            "the supervisor does not answer: `python -m sandbox down` ends it and all roles"
        ) from error
    except OSError as error:
        raise SandboxError("no stack is running here: `python -m sandbox up`") from error


class RemoteKeeper:
    """The supervisor as keeper of a stack's roles."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def start_role(self, name: str) -> None:
        ask(self.directory, {"do": "start", "role": name})

    def stop_role(self, name: str, *, kill: bool = False) -> None:
        """Returns when the role is gone."""
        ask(self.directory, {"do": "stop", "role": name, "kill": kill})
        pause = threading.Event()
        while self.status()[name]["state"] != "stopped":
            pause.wait(POLL_S)

    def running(self) -> dict[str, int]:
        return {n: s["pid"] for n, s in self.status().items() if s["state"] == "running"}

    def status(self) -> dict[str, dict[str, Any]]:
        """`{role: {"state": running|stopping|stopped|restarting, "pid": …, "restarts": …}}`."""
        status: dict[str, dict[str, Any]] = ask(self.directory, {"do": "status"})["roles"]
        return status

    def down(self, timeout_s: float) -> None:
        """Ends all roles and the supervisor; raises SandboxError when that takes too long."""
        ask(self.directory, {"do": "down"})
        _wait_until_gone(self.directory, timeout_s)
