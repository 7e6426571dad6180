"""`python -m sandbox …`: the stack on the command line."""

from __future__ import annotations

import argparse
import fcntl
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psycopg

from sandbox import clock, control, health, supervisor
from sandbox.binaries import CHECKOUT
from sandbox.control import RemoteKeeper
from sandbox.processes import SandboxError
from sandbox.roles import ROLES
from sandbox.stack import DEFAULT_VAULT_MODE, Limits, Stack
from sandbox.stripe_simulator.admin import MAX_ADVANCE_S

DEFAULT_DIRECTORY = CHECKOUT / ".sandbox"
DOWN_WITHIN_S = 150.0
CLOCK_ROLES = ("beat", "worker-control", "worker")
UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    directory: Path = options.directory.resolve()
    try:
        return _run(options, directory)
    except SandboxError as error:
        print(f"sandbox: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace, directory: Path) -> int:
    match options.command:
        case "up":
            with one_at_a_time(directory):
                wanted = options.only or ROLES
                return up(directory, options.limits, wanted, options.vault)
        case "down":
            return down(directory)
        case "status":
            return status(directory)
        case "start":
            return start(directory, options.role)
        case "stop":
            return stop(directory, options.role, kill=options.kill)
        case "restart":
            stop(directory, options.role, kill=False)
            return start(directory, options.role)
        case "clock":
            return advance_clock(directory, options.advance)
        case _:
            # Imported when asked for: it draws in the whole product.
            from sandbox import demo  # noqa: PLC0415

            return demo.main(directory / "demo", options.events, options.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sandbox", description=__doc__)
    parser.add_argument("--directory", type=Path, default=DEFAULT_DIRECTORY)
    commands = parser.add_subparsers(dest="command", required=True)
    started = commands.add_parser("up", help="start the stack; returns when it is healthy")
    started.add_argument("--limits", choices=["default", "fast"], default="default")
    started.add_argument("--vault", choices=["self", "off"], default=DEFAULT_VAULT_MODE)
    started.add_argument("--only", type=_role_list, metavar="ROLE,ROLE", help="not all roles")
    commands.add_parser("down", help="stop all of it; data and ports are kept")
    commands.add_parser("status", help="what runs")
    for name in ("start", "stop", "restart"):
        command = commands.add_parser(name, help=f"{name} one role")
        command.add_argument("role")
        if name == "stop":
            command.add_argument("--kill", action="store_true", help="SIGKILL to its group")
    moved = commands.add_parser("clock", help="move the ledger's and the simulator's clock")
    moved.add_argument("--advance", type=_duration_s, required=True, metavar="25h")
    shown = commands.add_parser("demo", help="the main job, with two kills, and its proof")
    shown.add_argument("--events", type=int, default=240)
    shown.add_argument("--json", type=Path, help="write the proof here as well")
    return parser


def _duration_s(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError("a number with s, m, h or d")
    return float(found[1]) * UNITS_S[found[2]]


def _role_list(text: str) -> tuple[str, ...]:
    wanted = text.split(",")
    unknown = [name for name in wanted if name not in ROLES]
    if unknown:
        raise argparse.ArgumentTypeError(f"no role {unknown[0]!r}; there are {', '.join(ROLES)}")
    return tuple(name for name in ROLES if name in wanted)


def say(text: str) -> None:
    print(f"sandbox: {text}", flush=True)


# --- the whole stack -----------------------------------------------------------------------


@contextmanager
def one_at_a_time(directory: Path) -> Iterator[None]:
    """Two `up` at once: the second waits, and finds the stack up."""
    directory.mkdir(mode=0o711, parents=True, exist_ok=True)
    with (directory / "up.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def up(directory: Path, limits: Limits, names: Sequence[str], vault_mode: str) -> int:
    begun = time.monotonic()
    wanted = Stack(directory, limits=limits, names=names, env={"VAULT_MODE": vault_mode})
    if control.supervisor_runs(directory):
        stack = Stack.load(directory)
        if (stack.limits, set(stack.names)) != (wanted.limits, set(wanted.names)):
            raise SandboxError("it is up with other roles or limits: `down` first")
        keeper = RemoteKeeper(stack.directory)
        if set(keeper.running()) == set(stack.names) and (directory / "env").exists():
            stack.wait_healthy(keeper, stack.names)
            say("already up")
            return _where(directory)
    else:
        stack = wanted
        stack.directory.chmod(0o711)
        killed = stack.kill_leftovers()
        if killed:
            say(f"ended {killed} processes of an earlier run")
        say("starting PostgreSQL, Redis, nsqd and the Stripe simulator")
        stack.prepare()
        supervisor.start_in_background(stack.directory)
        keeper = RemoteKeeper(stack.directory)
    stack.bring_up(keeper, say)
    say(f"healthy after {time.monotonic() - begun:.1f} s; Stripe is simulated")
    return _where(directory)


def _where(directory: Path) -> int:
    settings = Stack.load(directory).settings
    say(f"settings: {directory / 'env'}, logs: {directory / 'logs'}")
    say(f"Flower: {settings['FLOWER_URL']}, user and password: FLOWER_BASIC_AUTH there")
    return 0


def down(directory: Path) -> int:
    if not (directory / "stack.json").exists():
        say("nothing is up here")
        return 0
    if control.supervisor_runs(directory):
        try:
            RemoteKeeper(directory).down(DOWN_WITHIN_S)
        except SandboxError:
            say("the supervisor does not answer: killing it")
            control.kill_supervisor(directory)
    Stack.load(directory).kill_leftovers()
    (directory / "pids.json").unlink(missing_ok=True)
    say("down; data and ports are kept")
    return 0


def status(directory: Path) -> int:
    """Exit code 0 when every role runs."""
    roles = RemoteKeeper(directory).status()
    for name, found in roles.items():
        restarts = f"  restarts {found['restarts']}" if found["restarts"] else ""
        print(f"{name:16} {found['state']:10} {found['pid'] or '-':>8}{restarts}")
    return 0 if all(found["state"] == "running" for found in roles.values()) else 1


# --- one role ------------------------------------------------------------------------------


def start(directory: Path, role: str) -> int:
    stack = Stack.load(directory)
    stack.require(role)
    keeper = RemoteKeeper(directory)
    keeper.start_role(role)
    stack.wait_healthy(keeper, [role])
    say(f"{role} is up, pid {keeper.running()[role]}")
    return 0


def stop(directory: Path, role: str, *, kill: bool) -> int:
    Stack.load(directory).require(role)
    RemoteKeeper(directory).stop_role(role, kill=kill)
    say(f"{role} is stopped")
    return 0


# --- time ----------------------------------------------------------------------------------


def advance_clock(directory: Path, seconds: float) -> int:
    """Lets time pass for everybody while nobody acts: ledger first, then the simulator.

    In this order a charge never looks newer to the ledger than it is to Stripe. Nothing is touched
    where the simulator would not follow, and whom this stopped it starts again, come what may.
    """
    stack = Stack.load(directory)
    keeper = RemoteKeeper(directory)
    running = [name for name in CLOCK_ROLES if name in keeper.running()]
    simulator = stack.url("stripe", "/_sim/clock")
    _check_move(simulator, seconds)
    try:
        for name in running:
            keeper.stop_role(name)
        _move_clocks(stack.settings["DATABASE_URL"], simulator, seconds)
    finally:
        for name in reversed(running):
            keeper.start_role(name)
    stack.wait_healthy(keeper, running)
    say(f"the clocks moved forward by {seconds:g} s")
    return 0


def _check_move(simulator: str, seconds: float) -> None:
    if seconds > MAX_ADVANCE_S:
        raise SandboxError(f"a clock moves by {MAX_ADVANCE_S:g} s at most")
    try:
        health.get_json(simulator)
    except OSError as error:
        raise SandboxError(f"no clock was moved: {error}") from error


def _move_clocks(database_url: str, simulator: str, seconds: float) -> None:
    try:
        clock.advance(database_url, seconds)
    except psycopg.Error as error:
        trouble = error.sqlstate or type(error).__name__
        raise SandboxError(f"no clock was moved: PostgreSQL says {trouble}") from error
    try:
        health.request("POST", simulator, {"advance_s": seconds})
    except OSError as error:
        raise SandboxError(f"the ledger's clock moved, the simulator's did not: {error}") from error
