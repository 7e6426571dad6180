"""The background process that keeps the roles of a stack running (`python -m sandbox up`).

It does one thing: a role that is wanted and has died is started again, at once, or after a
doubling pause if it keeps dying. What to want comes over the control socket. One thread, no
blocking: a role that stops slowly delays nobody's restart.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sandbox import control, ports, roles
from sandbox.processes import Processes, SandboxError
from sandbox.stack import Stack

TICK_S = 0.1
RESTART_PAUSE_S = 0.2
LONGEST_PAUSE_S = 0.8
"""A role that ends by itself is back within a second, however often it does."""
SETTLED_AFTER_S = 10.0
"""A role that ran so long before it died is started again at once."""
READY_WITHIN_S = 30.0
LOCK_WITHIN_S = 2.0
REQUEST_BYTES = 65_536
SURVIVED = (OSError, subprocess.SubprocessError)
"""No trouble with one role or with a full disk ends the supervisor: all roles would die with it."""
DOWN_ORDER = (
    ("bridge-nsq", "bridge-redis", "beat", "flower"),
    ("worker", "worker-control"),
    ("vault",),
    ("stripe",),
    ("nsqd", "redis", "postgres"),
    ("nsqlookupd",),
)


@dataclass
class Watched:
    """What is wanted of one role, and how its last start went."""

    wanted: bool = False
    stop_deadline: float | None = None
    started_at: float = 0.0
    restart_at: float = 0.0
    failures: int = 0
    restarts: int = 0


class Supervisor:
    """Times here are monotonic seconds."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.processes = Processes(stack.directory)
        self.watched = {name: Watched() for name in stack.names}
        self._stopping_all = False
        self._listener = control.listen(stack.directory)
        self._listener.setblocking(False)

    def run(self) -> None:
        while not self.run_once(TICK_S):
            pass

    def run_once(self, timeout_s: float) -> bool:
        """One round: answers a command, mends what died. True when all is down for good."""
        ready, _, _ = select.select([self._listener], [], [], timeout_s)
        if ready:
            self._answer_one()
        for name, watched in self.watched.items():
            try:
                self._look_after(name, watched)
            except SURVIVED as error:
                say(f"{name} could not be looked after: {error}")
        self.processes.record_what_is_due()
        return self._stopping_all and self._all_down()

    # --- one role --------------------------------------------------------------------------

    def _look_after(self, name: str, watched: Watched) -> None:
        now = time.monotonic()
        if self.processes.is_alive(name):
            if watched.stop_deadline is not None and now > watched.stop_deadline:
                self.processes.kill(name)
            return
        if self.processes.child(name) is not None:
            self._has_ended(name, watched, now)
        if watched.wanted and now >= watched.restart_at:
            self._start(name, watched, now)

    def _has_ended(self, name: str, watched: Watched, now: float) -> None:
        self.processes.forget(name)
        watched.stop_deadline = None
        if not watched.wanted:
            return
        ran_s = now - watched.started_at
        watched.failures = 0 if ran_s > SETTLED_AFTER_S else watched.failures + 1
        pause_s = 0.0
        if watched.failures > 1:
            pause_s = min(RESTART_PAUSE_S * 2 ** (watched.failures - 2), LONGEST_PAUSE_S)
        watched.restart_at = now + pause_s
        watched.restarts += 1
        say(f"{name} ended by itself after {ran_s:.1f} s; starts again in {pause_s:.1f} s")

    def _start(self, name: str, watched: Watched, now: float) -> None:
        watched.started_at = now
        try:
            pid = self.processes.start(self.stack.spec(name))
        except (OSError, SandboxError) as error:
            watched.failures += 1
            watched.restart_at = now + LONGEST_PAUSE_S
            say(f"{name} cannot be started: {error}")
        else:
            say(f"{name} started, pid {pid}")

    def _want(self, name: str) -> None:
        watched = self.watched[name]
        watched.wanted, watched.failures, watched.restart_at = True, 0, 0.0

    def _stop(self, name: str, *, kill: bool) -> None:
        watched = self.watched[name]
        watched.wanted = False
        child = self.processes.child(name)
        if child is None:
            return
        if kill:
            self.processes.kill(name)
        elif watched.stop_deadline is None:
            self.processes.ask_to_stop(name)
            watched.stop_deadline = time.monotonic() + child.spec.grace_s

    # --- all of them -----------------------------------------------------------------------

    def _all_down(self) -> bool:
        """Stops one stage after the other: those who use a service before the service."""
        staged = {name for stage in DOWN_ORDER for name in stage}
        rest = tuple(name for name in self.watched if name not in staged)
        for stage in (rest, *DOWN_ORDER):
            alive = [name for name in stage if self.processes.is_alive(name)]
            for name in alive:
                self._stop(name, kill=False)
            if alive:
                return False
        return True

    def stop_all(self) -> None:
        self._stopping_all = True
        for watched in self.watched.values():
            watched.wanted = False

    # --- commands --------------------------------------------------------------------------

    def _answer_one(self) -> None:
        try:
            link, _ = self._listener.accept()
        except OSError:
            return
        with link:
            link.settimeout(1.0)
            try:
                request = json.loads(link.recv(REQUEST_BYTES))
                link.sendall(json.dumps(self.answer(request)).encode() + b"\n")
            except (OSError, ValueError, RecursionError) as error:
                say(f"a command was not understood: {type(error).__name__}")

    def answer(self, request: Any) -> dict[str, Any]:
        """Does what a request says, without waiting for it to take effect."""
        if not isinstance(request, dict):
            return {"error": "a request is a JSON object"}
        try:
            return self._do(str(request.get("do")), request)
        except (SandboxError, *SURVIVED) as error:
            return {"error": str(error)}

    def _do(self, what: str, request: dict[str, Any]) -> dict[str, Any]:
        if what == "status":
            return {"roles": self.status()}
        if what == "down":
            self.stop_all()
            return {}
        if self._stopping_all:
            raise SandboxError("the stack is going down")
        name = str(request.get("role"))
        self.stack.require(name)
        if what == "start":
            self._want(name)
            self._look_after(name, self.watched[name])
        elif what == "stop":
            self._stop(name, kill=bool(request.get("kill")))
        else:
            raise SandboxError(f"unknown command {what!r}")
        return {}

    def status(self) -> dict[str, dict[str, Any]]:
        pids = self.processes.pids()
        return {name: self._status(w, pids.get(name)) for name, w in self.watched.items()}

    @staticmethod
    def _status(watched: Watched, pid: int | None) -> dict[str, Any]:
        if pid is not None:
            state = "running" if watched.stop_deadline is None else "stopping"
        else:
            state = "restarting" if watched.wanted else "stopped"
        return {"state": state, "pid": pid, "restarts": watched.restarts}


def say(text: str) -> None:
    # The log may be on a full disk.
    with suppress(OSError):
        print(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}", flush=True)


def start_in_background(directory: Path) -> None:
    """Starts the supervisor of a prepared stack; returns when it answers.

    Our ports stay reserved while it lives: a role that is down for a while finds its own free.
    """
    with (directory / "logs" / "supervisor.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "sandbox.supervisor", str(directory)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=Path(__file__).resolve().parent.parent,
            env={**roles.base_environment(directory / "home"), **_from_the_caller()},
            pass_fds=ports.reservations(),
        )
    deadline = time.monotonic() + READY_WITHIN_S
    pause = threading.Event()
    while True:
        try:
            control.ask(directory, {"do": "status"})
        except SandboxError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SandboxError("the supervisor did not start: see supervisor.log") from None
            pause.wait(control.POLL_S)
        else:
            return


def _from_the_caller() -> dict[str, str]:
    """The supervisor looks for nsqd and redis-server where `make setup` looked; roles get none."""
    own = Path(sys.executable).parent
    return {
        "PATH": f"{own}:{os.environ.get('PATH', os.defpath)}",
        "TMPDIR": os.environ.get("TMPDIR", "/tmp"),  # noqa: S108 - the system's own choice
    }


def _take(lock: IO[str]) -> bool:
    """Tries for a while: whoever asks whether a supervisor runs holds the lock for an instant."""
    deadline = time.monotonic() + LOCK_WITHIN_S
    pause = threading.Event()
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            pause.wait(control.POLL_S)
        else:
            return True


def main(directory: Path) -> int:
    # Not truncated before it is ours: the holder's pid stands in it.
    lock = (directory / control.LOCK).open("a")
    if not _take(lock):
        say("another supervisor runs in this folder")
        return 1
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    supervisor = Supervisor(Stack.load(directory))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: supervisor.stop_all())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    say("supervisor started")
    supervisor.run()
    (directory / control.SOCKET).unlink(missing_ok=True)
    say("supervisor ends, nothing is left running")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
