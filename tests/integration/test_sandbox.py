"""The supervisor: what dies comes back, what is stopped stays stopped, nothing is left over."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import psycopg
import pytest
import redis

from sandbox import clock, ports
from sandbox.binaries import nsq_daemon
from sandbox.envfile import read_env
from sandbox.files import read_json
from sandbox.health import channel_stats, get_json
from sandbox.stack import Stack
from sandbox.supervisor import TICK_S
from tests.support.producers import billing_event, publish_nsq
from tests.support.sandboxes import GONE_WITHIN_S, Sandbox, alive
from tests.support.waiting import stays, wait_until

WITHIN_S = 30.0
ROLES = "redis,nsqlookupd,nsqd"
ENV_NAMES = {
    "DATABASE_URL",
    "CELERY_BROKER_URL",
    "REDIS_URL",
    "REDIS_STREAM",
    "REDIS_GROUP",
    "NSQD_TCP_ADDRESS",
    "NSQD_HTTP_ADDRESS",
    "NSQ_LOOKUPD_HTTP_ADDRESS",
    "NSQ_TOPIC",
    "NSQ_CHANNEL",
    "STRIPE_API_BASE",
    "STRIPE_API_KEY",
    "VAULT_MODE",
    "VAULT_URL",
    "VAULT_ADMIN_KEY",
    "FLOWER_URL",
    "FLOWER_BASIC_AUTH",
}


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    """A folder without a stack; whatever runs there afterwards is ended."""
    with tempfile.TemporaryDirectory(prefix="chargebridge-sandbox-") as folder:
        os.chmod(folder, 0o711)
        found = Sandbox(Path(folder) / "stack")
        yield found
        found.end()


def test_a_role_that_dies_is_back_within_a_second_with_its_port_and_data(sandbox: Sandbox) -> None:
    sandbox.run("up", "--only", ROLES)
    url = read_env(sandbox.directory / "env")["REDIS_URL"]
    with redis.Redis.from_url(url) as client:
        client.set("kept", "yes")
    before = sandbox.pids()["redis"]
    os.killpg(before, signal.SIGKILL)
    sandbox.wait_replaced("redis", before)
    (after_s,) = sandbox.back_after_s("redis")
    assert after_s == pytest.approx(TICK_S), "it does not pause"
    assert after_s < 1.0

    def value() -> bytes | None:
        with suppress(redis.RedisError), redis.Redis.from_url(url) as client:
            found = client.get("kept")
            assert found is None or isinstance(found, bytes)
            return found
        return None

    assert wait_until(value, WITHIN_S, "redis answers on its old port") == b"yes"


def test_a_role_that_dies_again_and_again_is_back_as_soon(sandbox: Sandbox) -> None:
    sandbox.run("up", "--only", ROLES)
    for _ in range(8):
        before = sandbox.pids()["nsqlookupd"]
        os.killpg(before, signal.SIGKILL)
        sandbox.wait_replaced("nsqlookupd", before)
    after_s = sandbox.back_after_s("nsqlookupd")
    assert len(after_s) == 8
    assert max(after_s) < 1.0


def test_a_proof_that_could_not_be_written_is_refused_before_the_demo(sandbox: Sandbox) -> None:
    for path in (sandbox.directory / "none" / "proof.json", sandbox.directory.parent):
        refused = sandbox.run("demo", "--events", "5", "--json", str(path), ok=False)
        assert refused.returncode == 1
        (line,) = refused.stderr.strip().splitlines()
        assert line.endswith(f"{path} cannot be written")


def test_nsqd_keeps_its_messages_below_a_path_with_a_percent_sign(sandbox: Sandbox) -> None:
    sandbox.directory = sandbox.directory.with_name("50%done")
    sandbox.run("up", "--only", ROLES)
    settings = read_env(sandbox.directory / "env")
    publish_nsq(settings, billing_event("one"))
    sandbox.run("stop", "--kill", "nsqd")
    sandbox.run("start", "nsqd")
    # From the topic into the channel is a way of its own.
    wait_until(lambda: channel_stats(settings)["depth"] >= 1, WITHIN_S, "it is in the channel")


def test_a_stopped_role_stays_stopped_until_it_is_started(sandbox: Sandbox) -> None:
    sandbox.run("up", "--only", ROLES)
    pid = sandbox.pids()["nsqd"]
    sandbox.run("stop", "nsqd")
    assert not alive(pid)
    wait_until(lambda: "nsqd" not in sandbox.pids(), WITHIN_S, "pids.json says so as well")
    stays(lambda: "nsqd" not in sandbox.pids(), 1.5, "nsqd is not started again")
    assert sandbox.run("status", ok=False).returncode == 1
    sandbox.run("start", "nsqd")
    assert alive(sandbox.pids()["nsqd"])
    assert sandbox.run("status").returncode == 0


def test_stop_with_kill_ends_a_frozen_process_at_once(sandbox: Sandbox) -> None:
    sandbox.run("up", "--only", ROLES)
    pid = sandbox.pids()["redis"]
    os.kill(pid, signal.SIGSTOP)
    sandbox.run("stop", "--kill", "redis")
    assert not alive(pid)


def test_restart_gives_a_new_process_on_the_same_ports(sandbox: Sandbox) -> None:
    sandbox.run("up", "--only", ROLES)
    before, ports = sandbox.pids(), read_json(sandbox.directory / "stack.json")["ports"]
    sandbox.run("restart", "nsqd")
    after = sandbox.pids()
    assert after["nsqd"] != before["nsqd"]
    assert {**after, "nsqd": 0} == {**before, "nsqd": 0}
    assert read_json(sandbox.directory / "stack.json")["ports"] == ports


def test_each_role_leads_a_process_group_of_its_own_and_logs_to_its_file(sandbox: Sandbox) -> None:
    sandbox.run("up", "--only", ROLES)
    for role, pid in sandbox.pids().items():
        assert os.getpgid(pid) == pid
        assert (sandbox.directory / "logs" / f"{role}.log").stat().st_size > 0
    assert set(sandbox.pids()) == set(ROLES.split(","))


def test_a_shell_can_source_the_env_file(sandbox: Sandbox) -> None:
    sandbox.run("up", "--only", ROLES)
    script = 'set -a; . "$0"; set +a; env -0'
    file = sandbox.directory / "env"
    told = subprocess.run(
        ["sh", "-c", script, str(file)], check=True, capture_output=True, text=True, env={}
    )
    sourced = dict(line.split("=", 1) for line in told.stdout.split("\0") if line)
    settings = Stack.load(sandbox.directory).settings
    assert sourced.keys() >= ENV_NAMES
    assert {name: sourced[name] for name in settings} == settings
    assert file.stat().st_mode & 0o077 == 0


def test_up_again_says_so_and_changes_nothing(sandbox: Sandbox) -> None:
    sandbox.run("up", "--only", ROLES)
    before = sandbox.pids()
    again = sandbox.run("up", "--only", ROLES)
    assert "already up" in again.stdout
    assert sandbox.pids() == before


def test_up_works_after_the_supervisor_was_killed(sandbox: Sandbox) -> None:
    sandbox.run("up", "--only", ROLES)
    before, ports = sandbox.pids(), read_json(sandbox.directory / "stack.json")["ports"]
    sandbox.kill_supervisor()
    wait_until(lambda: not any(map(alive, before.values())), GONE_WITHIN_S, "the roles die with it")
    sandbox.run("up", "--only", ROLES)
    assert not set(before.values()) & set(sandbox.pids().values())
    assert read_json(sandbox.directory / "stack.json")["ports"] == ports
    assert sandbox.run("status").returncode == 0


def test_down_leaves_no_process_and_up_finds_the_data_again(sandbox: Sandbox) -> None:
    sandbox.run("up", "--only", ROLES)
    with redis.Redis.from_url(read_env(sandbox.directory / "env")["REDIS_URL"]) as client:
        client.set("kept", "yes")
    sandbox.run("down")
    assert sandbox.processes() == []
    with pytest.raises(AssertionError, match="no supervisor runs"):
        sandbox.supervisor()
    assert sandbox.run("down").returncode == 0
    sandbox.run("up", "--only", ROLES)
    with redis.Redis.from_url(read_env(sandbox.directory / "env")["REDIS_URL"]) as client:
        assert client.get("kept") == b"yes"


def test_a_port_that_a_stranger_took_meanwhile_is_chosen_anew(sandbox: Sandbox) -> None:
    sandbox.run("up", "--only", ROLES)
    port = read_json(sandbox.directory / "stack.json")["ports"]["redis"]
    sandbox.run("down")
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", port))
        stranger.listen()
        sandbox.run("up", "--only", ROLES)
        assert read_json(sandbox.directory / "stack.json")["ports"]["redis"] != port


def test_the_port_of_a_role_that_is_down_is_kept_from_others_until_the_stack_is(
    sandbox: Sandbox,
) -> None:
    sandbox.run("up", "--only", ROLES)
    port = read_json(sandbox.directory / "stack.json")["ports"]["redis"]
    sandbox.run("stop", "redis")
    assert ports.is_free(port)
    assert not ports._reserve(port)
    sandbox.run("down")
    wait_until(lambda: ports._reserve(port), WITHIN_S, "anybody may have it")


def test_a_program_on_the_callers_path_is_the_one_that_runs(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_path = tmp_path / "nsqlookupd"
    on_path.symlink_to(nsq_daemon("nsqlookupd"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sandbox.run("up", "--only", "nsqlookupd")
    role = psutil.Process(sandbox.pids()["nsqlookupd"])
    assert role.cmdline()[0] == str(on_path)
    assert str(tmp_path) not in role.environ()["PATH"]


def test_a_role_that_is_not_there_is_refused(sandbox: Sandbox) -> None:
    sandbox.run("up", "--only", ROLES)
    refused = sandbox.run("stop", "nonsense", ok=False)
    assert refused.returncode == 1
    assert "no role 'nonsense'" in refused.stderr


def test_up_tells_of_a_supervisor_that_does_not_answer_and_down_ends_it(sandbox: Sandbox) -> None:
    sandbox.run("up", "--only", ROLES)
    sandbox.supervisor().send_signal(signal.SIGSTOP)
    refused = sandbox.run("up", "--only", ROLES, ok=False)
    assert refused.returncode == 1
    (line,) = refused.stderr.strip().splitlines()
    assert "the supervisor does not answer: `python -m sandbox down`" in line
    sandbox.run("down")
    assert sandbox.processes() == []
    with pytest.raises(AssertionError, match="no supervisor runs"):
        sandbox.supervisor()


def test_commands_without_a_stack_are_refused_in_one_line(sandbox: Sandbox) -> None:
    for command in (("status",), ("stop", "redis"), ("start", "redis"), ("clock", "--advance=1h")):
        refused = sandbox.run(*command, ok=False)
        assert refused.returncode == 1
        assert len(refused.stderr.strip().splitlines()) == 1


def _offsets_s(settings: dict[str, str]) -> tuple[float, float]:
    """How far ahead the ledger's clock and the simulator's are."""
    with psycopg.connect(settings["DATABASE_URL"]) as link:
        row = link.execute("SELECT offset_s FROM sandbox_clock").fetchone()
    assert row is not None
    return row[0], get_json(f"{settings['STRIPE_API_BASE']}/_sim/clock")["offset_s"]


def test_a_clock_that_cannot_be_moved_moves_no_other_and_leaves_the_roles_running(
    sandbox: Sandbox,
) -> None:
    sandbox.run("up", "--only", "postgres,redis,stripe,beat")
    settings = read_env(sandbox.directory / "env")
    for stopped, by in ((None, "20000d"), ("stripe", "1h"), ("postgres", "1h")):
        if stopped is not None:
            sandbox.run("stop", stopped)
        refused = sandbox.run("clock", "--advance", by, ok=False)
        assert refused.returncode == 1
        (line,) = refused.stderr.strip().splitlines()
        assert line.startswith("sandbox: ")
        assert "beat" in sandbox.pids()
        if stopped is not None:
            sandbox.run("start", stopped)
        assert _offsets_s(settings) == (0.0, 0.0)
    with pytest.raises(psycopg.errors.DatetimeFieldOverflow):
        clock.advance(settings["DATABASE_URL"], 1e13)
    assert _offsets_s(settings) == (0.0, 0.0)
    sandbox.run("clock", "--advance", "1h")
    assert _offsets_s(settings) == (3600.0, 3600.0)
