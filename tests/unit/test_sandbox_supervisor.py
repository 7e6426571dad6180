"""The supervisor's own rounds, against real processes that are cheap to start."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sandbox import control, processes
from sandbox.files import read_json
from sandbox.postgres import Postgres
from sandbox.processes import RoleSpec, SandboxError
from sandbox.stack import Stack
from sandbox.supervisor import Supervisor
from tests.support.sandboxes import alive
from tests.support.waiting import wait_until

SLEEPER = (sys.executable, "-c", "import signal; signal.pause()")
DEAF = (
    sys.executable,
    "-c",
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True);"
    "signal.pause()",
)
WITHIN_S = 30.0
GRACE_S = 3600.0
ENDS_AT_ONCE = (sys.executable, "-c", "")


class OneRole(Stack):
    """A stack whose only role, called redis, runs another command."""

    def __init__(self, directory: Path, command: tuple[str, ...]) -> None:
        super().__init__(directory, names=("redis",))
        self.command = command

    def spec(self, name: str) -> RoleSpec:
        self.require(name)
        log = self.directory / "redis.log"
        return RoleSpec(name, self.command, self.directory, log, dict(os.environ), grace_s=GRACE_S)


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def supervised(directory: Path, command: tuple[str, ...]) -> Supervisor:
    supervisor = Supervisor(OneRole(directory, command))
    supervisor.answer({"do": "start", "role": "redis"})
    return supervisor


def state(supervisor: Supervisor) -> str:
    supervisor.run_once(0.01)
    return str(supervisor.status()["redis"]["state"])


def test_a_role_that_keeps_dying_is_started_with_growing_pauses_below_a_second(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    supervisor = supervised(directory, ENDS_AT_ONCE)
    watched = supervisor.watched["redis"]

    def died_six_times() -> bool:
        supervisor.run_once(0.01)
        return watched.restarts == 6

    wait_until(died_six_times, 30.0, "it dies again and again")
    pauses = re.findall(r"starts again in (\S+) s", capsys.readouterr().out)
    assert pauses == ["0.0", "0.2", "0.4", "0.8", "0.8", "0.8"]
    supervisor.processes.kill_all()


def test_a_role_that_ignores_the_request_to_end_is_killed_after_its_grace(
    directory: Path,
) -> None:
    supervisor = supervised(directory, DEAF)
    log = directory / "redis.log"
    wait_until(lambda: "deaf" in log.read_text(), WITHIN_S, "it ignores SIGTERM by now")
    begun = time.monotonic()
    supervisor.answer({"do": "stop", "role": "redis"})
    assert state(supervisor) == "stopping"
    stop_by = supervisor.watched["redis"].stop_deadline
    assert stop_by is not None
    assert stop_by >= begun + GRACE_S
    # As if it were over.
    supervisor.watched["redis"].stop_deadline = stop_by - GRACE_S
    wait_until(lambda: state(supervisor) == "stopped", WITHIN_S, "it is killed")


def test_all_processes_of_the_group_go_with_a_killed_leader(directory: Path) -> None:
    spawning = "import os, signal; pid = os.fork();pid and print(pid, flush=True); signal.pause()"
    supervisor = supervised(directory, (sys.executable, "-c", spawning))
    log = directory / "redis.log"
    child = int(wait_until(lambda: log.read_text().strip(), WITHIN_S, "the leader has a child"))
    leader = supervisor.processes.pids()["redis"]
    os.kill(leader, signal.SIGKILL)
    wait_until(
        lambda: state(supervisor) == "running" and supervisor.processes.pids()["redis"] != leader,
        WITHIN_S,
        "the role runs again",
    )
    wait_until(lambda: not alive(child), WITHIN_S, "the child of the dead leader is gone")
    supervisor.processes.kill_all()


def test_down_refuses_new_starts_and_ends_when_nothing_runs(directory: Path) -> None:
    supervisor = supervised(directory, SLEEPER)
    supervisor.answer({"do": "down"})
    assert "error" in supervisor.answer({"do": "start", "role": "redis"})
    wait_until(lambda: supervisor.run_once(0.01), WITHIN_S, "the supervisor is through")
    assert supervisor.processes.pids() == {}


def test_unknown_roles_and_commands_are_refused(directory: Path) -> None:
    supervisor = supervised(directory, SLEEPER)
    assert "error" in supervisor.answer({"do": "start", "role": "nonsense"})
    assert "error" in supervisor.answer({"do": "dance", "role": "redis"})
    with pytest.raises(SandboxError):
        supervisor.stack.require("nonsense")
    supervisor.processes.kill_all()


def test_a_full_disk_ends_nobody_and_the_record_is_written_when_there_is_room(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = supervised(directory, SLEEPER)
    first = supervisor.processes.pids()["redis"]

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(processes, "write_json", full)
        patched.setattr(sys.stdout, "flush", full)
        os.kill(first, signal.SIGKILL)
        wait_until(
            lambda: (
                state(supervisor) == "running" and supervisor.processes.pids()["redis"] != first
            ),
            WITHIN_S,
            "the role runs again",
        )
        assert supervisor.answer({"do": "stop", "role": "redis", "kill": True}) == {}
        assert supervisor.answer({"do": "start", "role": "redis"}) == {}
    second = supervisor.processes.pids()["redis"]
    assert read_json(directory / "pids.json") == {"redis": first}
    supervisor.run_once(0.01)
    assert read_json(directory / "pids.json") == {"redis": second}
    supervisor.processes.kill_all()


def test_trouble_with_one_role_does_not_end_the_supervisor(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    supervisor = supervised(directory, SLEEPER)

    def trouble(_: str) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(supervisor.processes, "is_alive", trouble)
        assert not supervisor.run_once(0.01)
    assert "redis could not be looked after" in capsys.readouterr().out
    assert state(supervisor) == "running"
    supervisor.processes.kill_all()


@pytest.mark.parametrize("request_text", [b"[]", b"1", b"null", b"[" * 60_000, b"\xff", b""])
def test_a_request_that_is_no_object_is_refused_and_the_next_one_answered(
    directory: Path, request_text: bytes
) -> None:
    supervisor = supervised(directory, SLEEPER)
    with socket.socket(socket.AF_UNIX) as link, control._short_path(directory) as path:
        link.connect(path)
        link.sendall(request_text)
        link.shutdown(socket.SHUT_WR)
        assert not supervisor.run_once(1.0)
    assert state(supervisor) == "running"
    supervisor.processes.kill_all()


def test_a_pid_file_with_another_users_process_does_not_keep_postgres_down(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed:
        def __init__(self, pid: int) -> None:
            self.pid = pid

        def name(self) -> str:
            return "postgres"

        def cwd(self) -> str:
            raise psutil.AccessDenied(self.pid)

    monkeypatch.setattr(psutil, "Process", Closed)
    (directory / "postmaster.pid").write_text("1\n")
    Postgres(directory, directory, None, 1, "")._before_start()
    assert not (directory / "postmaster.pid").exists()
