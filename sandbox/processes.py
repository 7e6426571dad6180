"""Starts, signals and ends the processes of one sandbox folder, each in a group of its own.

A child dies with its parent (parent-death signal), is known by a mark in its environment and by
pid and start time in `processes.json`: after a SIGKILL of the parent the next one can tell its
leftovers from strangers that got their pid.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from sandbox.files import read_json, write_json

MARK = "CHARGEBRIDGE_SANDBOX_ROLE_OF"
"""Environment variable of every role; its value is the sandbox folder."""
SELF_TITLING = ("postgres", "redis-server")
"""Programs that write their title over their environment: known by their folder instead."""
KILL_POLL_S = 0.05
KILL_TIMEOUT_S = 30.0
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LAUNCHER = Path(__file__).with_name("launch.py")


class SandboxError(Exception):
    """The sandbox cannot do what was asked; the message is one clear line."""


@dataclass(frozen=True)
class Account:
    """The ordinary user that a role runs as."""

    uid: int
    gid: int


@dataclass(frozen=True)
class RoleSpec:
    """How one role is started and stopped."""

    name: str
    command: tuple[str, ...]
    directory: Path
    log: Path
    environment: Mapping[str, str] = field(repr=False)
    account: Account | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    grace_s: float = 10.0
    before_start: Callable[[], None] | None = None


@dataclass
class Child:
    spec: RoleSpec
    process: subprocess.Popen[bytes]
    started: float

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


class Processes:
    """The running roles of one folder. Not thread safe; to be used from the main thread only,
    since the kernel ties a parent-death signal to the thread that started the child."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._children: dict[str, Child] = {}
        self._record_due = False

    def start(self, spec: RoleSpec) -> int:
        """Starts a role that is not running; returns its pid (also its process group)."""
        assert threading.current_thread() is threading.main_thread()
        if self.is_alive(spec.name):
            raise SandboxError(f"{spec.name} is running already")
        if spec.before_start is not None:
            spec.before_start()
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        account = spec.account
        ids = ["-", "-"] if account is None else [str(account.uid), str(account.gid)]
        launcher = [sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid()), "9", *ids, "--"]
        with spec.log.open("ab") as log:
            process = subprocess.Popen(
                [*launcher, *spec.command],
                cwd=spec.directory,
                env={**spec.environment, MARK: str(self._directory)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._children[spec.name] = Child(spec, process, time.time())
        self._record()
        return process.pid

    def signal(self, name: str, number: int) -> None:
        """Sends a signal to the whole group; a group that is gone is fine."""
        child = self._children.get(name)
        if child is not None:
            signal_group(child.pid, number)

    def kill(self, name: str) -> None:
        """SIGKILL to the group, and waits until the leader is gone."""
        self.signal(name, signal.SIGKILL)
        self.forget(name)

    def stop(self, name: str) -> None:
        """Asks the leader to end; SIGKILL to the group when its grace is over."""
        child = self._children.get(name)
        if child is None:
            return
        self.ask_to_stop(name)
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(child.spec.grace_s)
        self.kill(name)

    def ask_to_stop(self, name: str) -> None:
        child = self._children.get(name)
        if child is not None and child.alive:
            # A frozen process must be able to hear it.
            child.process.send_signal(signal.SIGCONT)
            child.process.send_signal(child.spec.stop_signal)

    def forget(self, name: str) -> None:
        """Drops a role whose leader is dead or dying, with what is left of its group."""
        child = self._children.pop(name, None)
        if child is not None:
            signal_group(child.pid, signal.SIGKILL)
            child.process.wait(KILL_TIMEOUT_S)
            self._record()

    def stop_all(self) -> None:
        for name in reversed(list(self._children)):
            self.stop(name)

    def kill_all(self) -> None:
        for name in list(self._children):
            self.signal(name, signal.SIGKILL)
        for name in list(self._children):
            self.forget(name)

    def is_alive(self, name: str) -> bool:
        child = self._children.get(name)
        return child is not None and child.alive

    def child(self, name: str) -> Child | None:
        return self._children.get(name)

    def dead(self) -> list[str]:
        """Roles that ended by themselves and were not forgotten yet."""
        return [name for name, child in self._children.items() if not child.alive]

    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self._children.items() if child.alive}

    def _record(self) -> None:
        self._record_due = True
        self.record_what_is_due()

    def record_what_is_due(self) -> None:
        """Writes down which roles run. A full disk ends none of them: it is tried again here."""
        if self._record_due:
            with suppress(OSError):
                self._write_record()
                self._record_due = False

    def _write_record(self) -> None:
        children = self._children.values()
        known = {c.spec.name: [c.pid, start_time(c.pid)] for c in children if c.alive}
        write_json(self._directory / "processes.json", known)
        # World-readable: a monitor of another user may look at pids, they are no secret.
        write_json(self._directory / "pids.json", self.pids(), mode=0o644)


def start_time(pid: int) -> str | None:
    """When a pid started, as the kernel counts it: with the pid, a name for one process.

    Boot id and clock ticks since that boot; None for a pid that is not there.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return f"{BOOT_ID.read_text().strip()}:{fields[19]}"


def signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def leftovers(directory: Path, data_folders: Iterable[Path] = ()) -> list[psutil.Process]:
    """Processes that an earlier run in this folder left behind; never this process."""
    recorded = {tuple(entry) for entry in (read_json(directory / "processes.json") or {}).values()}
    folders = {str(folder) for folder in data_folders}
    return [
        process
        for process in psutil.process_iter()
        if process.pid != os.getpid() and _is_ours(process, str(directory), recorded, folders)
    ]


def _is_ours(
    process: psutil.Process,
    directory: str,
    recorded: set[tuple[int, str | None]],
    folders: set[str],
) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        if (process.pid, start_time(process.pid)) in recorded:
            return True
        if process.environ().get(MARK) == directory:
            return True
        return process.name() in SELF_TITLING and process.cwd() in folders
    except psutil.Error:
        return False


def kill_leftovers(directory: Path, data_folders: Iterable[Path] = ()) -> int:
    """SIGKILLs them and waits; returns how many there were. Raises SandboxError if one stays."""
    folders = list(data_folders)
    killed: set[int] = set()
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while found := leftovers(directory, folders):
        if time.monotonic() > deadline:
            raise SandboxError(f"processes of an earlier run will not die: {found}")
        for process in found:
            try:
                process.kill()
                killed.add(process.pid)
            except psutil.NoSuchProcess:
                pass
        # Briefly: a dead one may stay a zombie until whoever inherited it looks.
        psutil.wait_procs(found, timeout=KILL_POLL_S)
    return len(killed)
