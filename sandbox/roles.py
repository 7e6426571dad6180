"""Every role of the stack: its command line, and what must hold for it to count as healthy."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sandbox import binaries
from sandbox.ports import LOOPBACK
from sandbox.processes import RoleSpec

SERVICES = ("postgres", "redis", "nsqlookupd", "nsqd", "stripe")
VAULT = "vault"
"""There only with VAULT_MODE=self; workers refuse to start without it."""
APPLICATION = ("worker", "worker-control", "beat", "bridge-nsq", "bridge-redis")
FLOWER = "flower"
"""Last: it asks the workers for what it shows when it starts."""
ROLES = (*SERVICES, VAULT, *APPLICATION, FLOWER)
PORTS = (
    "postgres",
    "redis",
    "nsqlookupd-tcp",
    "nsqlookupd-http",
    "nsqd-tcp",
    "nsqd-http",
    "stripe",
    "vault",
    "flower",
)
WORKER_SLOTS = 16
CONTROL_SLOTS = 2
REDIS_DATABASES = 512
WORKER_GRACE_S = 45.0
"""A warm stop waits for running charges; Celery's hard limit is below this."""
VAULT_GRACE_S = {"fast": 20.0, "default": 85.0}
"""By the time limits: a stop waits for what is under way at Stripe (VAULT_UPSTREAM_S)."""

Pool = Literal["prefork", "threads", "solo"]


@dataclass(frozen=True)
class Place:
    """Where roles keep their things."""

    directory: Path
    base_environment: Mapping[str, str]

    def folder(self, name: str) -> Path:
        path = self.directory / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def spec(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        grace_s: float = 10.0,
        directory: Path = binaries.CHECKOUT,
    ) -> RoleSpec:
        return RoleSpec(
            name=name,
            command=tuple(command),
            directory=directory,
            log=self.directory / "logs" / f"{name}.log",
            environment={**self.base_environment, **(environment or {})},
            grace_s=grace_s,
        )


def base_environment(home: Path) -> dict[str, str]:
    """A clean environment: nothing of the caller's own reaches a role."""
    scripts = Path(sys.executable).parent
    return {
        "PATH": f"{scripts}:{os.defpath}",
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
    }


# --- services ------------------------------------------------------------------------------


def redis(place: Place, port: int) -> RoleSpec:
    folder = place.folder("redis")
    options = {
        "port": str(port),
        "bind": LOOPBACK,
        "dir": str(folder),
        "databases": str(REDIS_DATABASES),
        "appendonly": "yes",
        "save": "",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    return place.spec("redis", [binaries.redis_server(), *flags])


def nsqlookupd(place: Place, ports: Mapping[str, int]) -> RoleSpec:
    return place.spec(
        "nsqlookupd",
        [
            binaries.nsq_daemon("nsqlookupd"),
            f"--tcp-address={LOOPBACK}:{ports['nsqlookupd-tcp']}",
            f"--http-address={LOOPBACK}:{ports['nsqlookupd-http']}",
            f"--broadcast-address={LOOPBACK}",
        ],
    )


def nsqd(place: Place, ports: Mapping[str, int], options: Sequence[str] = ()) -> RoleSpec:
    """Every message is on disk, and synced, before its publisher hears OK."""
    return place.spec(
        "nsqd",
        [
            binaries.nsq_daemon("nsqd"),
            f"--tcp-address={LOOPBACK}:{ports['nsqd-tcp']}",
            f"--http-address={LOOPBACK}:{ports['nsqd-http']}",
            f"--lookupd-tcp-address={LOOPBACK}:{ports['nsqlookupd-tcp']}",
            f"--broadcast-address={LOOPBACK}",
            # Not the folder's name: nsqd takes a % in it for a format.
            "--data-path=.",
            "--mem-queue-size=0",
            "--sync-every=1",
            *options,
        ],
        directory=place.folder("nsqd"),
    )


def stripe(place: Place, port: int) -> RoleSpec:
    state = place.folder("stripe") / "state"
    module = [sys.executable, "-m", "sandbox.stripe_simulator"]
    return place.spec("stripe", [*module, "--port", str(port), "--state", str(state)])


# --- the application -----------------------------------------------------------------------


def celery(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "celery", "-A", "tasks", *arguments]


def vault(place: Place, settings: Mapping[str, str], name: str = VAULT) -> RoleSpec:
    grace_s = VAULT_GRACE_S["fast" if settings.get("LIMITS") == "fast" else "default"]
    return place.spec(name, celery("vault", "serve"), settings, grace_s=grace_s)


def celery_worker(
    place: Place,
    settings: Mapping[str, str],
    *,
    name: str,
    queue: str,
    slots: int,
    pool: Pool = "prefork",
    arguments: Sequence[str] = (),
) -> RoleSpec:
    command = celery(
        "worker",
        f"--queues={queue}",
        f"--concurrency={slots}",
        f"--pool={pool}",
        f"--hostname={name}@%h",
        "--loglevel=INFO",
        *arguments,
    )
    own = {**settings, "TMPDIR": str(_empty_folder(place, name))}
    return place.spec(name, command, own, grace_s=WORKER_GRACE_S)


def _empty_folder(place: Place, name: str) -> Path:
    """For a worker's temporary files: one that is killed leaves them behind."""
    folder = place.folder(name) / "tmp"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(exist_ok=True)
    return folder


def worker(place: Place, settings: Mapping[str, str]) -> RoleSpec:
    return celery_worker(place, settings, name="worker", queue="charges", slots=WORKER_SLOTS)


def worker_control(place: Place, settings: Mapping[str, str]) -> RoleSpec:
    return celery_worker(
        place, settings, name="worker-control", queue="control", slots=CONTROL_SLOTS
    )


def beat_schedule(place: Place, name: str = "beat") -> Path:
    return place.folder(name) / "schedule"


def beat(place: Place, settings: Mapping[str, str], name: str = "beat") -> RoleSpec:
    schedule = beat_schedule(place, name)
    # No pid file: the supervisor sees to it that there is one beat.
    arguments = [f"--schedule={schedule}", "--pidfile=", "--loglevel=INFO"]
    return place.spec(name, celery("beat", *arguments), settings)


def bridge(
    place: Place, settings: Mapping[str, str], source: str, name: str | None = None
) -> RoleSpec:
    """`source` is `nsq` or `redis`."""
    return place.spec(name or f"bridge-{source}", celery("bridge", source), settings, grace_s=20.0)


def flower(place: Place, settings: Mapping[str, str], port: int, name: str = "flower") -> RoleSpec:
    state = place.folder(name) / "flower.db"
    command = celery(
        "flower",
        f"--address={LOOPBACK}",
        f"--port={port}",
        "--persistent=True",
        f"--db={state}",
        "--state_save_interval=5000",
    )
    return place.spec(name, command, settings)
