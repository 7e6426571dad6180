"""Processes of the product, to start against a test's own services and to kill."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from sandbox import health, roles
from sandbox.ports import free_port
from sandbox.processes import Processes, RoleSpec
from sandbox.stack import new_encryption_key, vault_settings
from tests.support.services import rename
from tests.support.waiting import wait_until

SLOTS = 4
ADMIN_KEY = "admin-key-of-the-tests"
READY_WITHIN_S = 60.0
EXIT_WITHIN_S = 60.0


class Role:
    """One running process group of the product."""

    def __init__(
        self, processes: Processes, kind: str, spec: RoleSpec, settings: Mapping[str, str]
    ) -> None:
        self._processes = processes
        self._kind = kind
        self._spec = spec
        self._begun = time.time()
        self.settings = dict(settings)
        self.name = spec.name
        self.pid = processes.start(spec)
        child = processes.child(spec.name)
        assert child is not None
        self._process = child.process

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self, timeout_s: float = READY_WITHIN_S) -> Role:
        """Returns itself when the process does its work; fails with its log if it ends."""
        wait_until(self._is_ready, timeout_s, f"{self.name} is ready; its log:\n{self.log()}")
        return self

    def _is_ready(self) -> bool:
        if not self.alive:
            raise AssertionError(f"{self.name} ended ({self._process.returncode}): {self.log()}")
        return not self._problem()

    def _problem(self) -> str | None:
        if self._kind in ("worker", "worker-control"):
            return health.celery_worker(self.settings["CELERY_BROKER_URL"], self.name)
        if self._kind == "beat":
            return health.beat(self._spec.log.parents[1] / self.name / "schedule", self._begun)
        if self._kind.startswith("bridge-") and "bridge_started" not in self.log():
            # The brokers may still count one that was killed a moment ago.
            return "it has not started"
        alike = sum(n.startswith(f"{self._kind}-") for n in self._processes.pids())
        if self._kind == "bridge-nsq":
            return health.bridge_nsq(self.settings, alike)
        if self._kind == "bridge-redis":
            return health.bridge_redis(self.settings, alike)
        return health.listens(self.settings["VAULT_URL" if self._kind == "vault" else "FLOWER_URL"])

    def log(self) -> str:
        return self._spec.log.read_text(errors="replace") if self._spec.log.exists() else ""

    def kill(self) -> None:
        """SIGKILL to the group."""
        self._processes.kill(self.name)

    def terminate(self) -> None:
        """SIGTERM to the leader only, as a process manager does."""
        os.kill(self.pid, signal.SIGTERM)

    def freeze(self) -> None:
        self._processes.signal(self.name, signal.SIGSTOP)

    def thaw(self) -> None:
        self._processes.signal(self.name, signal.SIGCONT)

    def wait_exit(self, timeout_s: float = EXIT_WITHIN_S) -> int:
        """The exit code (negative: the signal), once the leader has ended."""
        wait_until(lambda: not self.alive, timeout_s, f"{self.name} ends; log:\n{self.log()}")
        assert self._process.returncode is not None
        return self._process.returncode


class RoleStarter:
    """`role("worker", pool="threads", LEASE_S="3")` starts a role; ready unless `wait=False`.

    Kinds: worker, worker-control, beat, bridge-nsq, bridge-redis, flower, vault. Any number of
    each. A vault counts for the roles that are started after it.
    """

    def __init__(self, processes: Processes, folder: Path, settings: Mapping[str, str]) -> None:
        self._processes = processes
        self._settings = dict(settings)
        self._started: list[Role] = []
        self._place = roles.Place(folder, roles.base_environment(folder))
        self._count = 0

    def __call__(
        self,
        kind: str,
        *,
        concurrency: int = SLOTS,
        pool: roles.Pool = "prefork",
        wait: bool = True,
        **env: str,
    ) -> Role:
        self._count += 1
        name = f"{kind}-{self._count}"
        if kind == "vault":
            self._settings |= self.vault_settings(free_port())
        settings = {**self._settings, **env}
        if kind == "flower":
            port = free_port()
            settings["FLOWER_URL"] = f"http://127.0.0.1:{port}"
            spec = roles.flower(self._place, settings, port, name)
        else:
            spec = self._spec(kind, name, settings, concurrency, pool)
        started = Role(self._processes, kind, rename(spec, name), settings)
        self._started.append(started)
        return started.wait_ready() if wait else started

    def _spec(
        self, kind: str, name: str, settings: dict[str, str], slots: int, pool: roles.Pool
    ) -> RoleSpec:
        if kind in ("worker", "worker-control"):
            queue = "charges" if kind == "worker" else "control"
            return roles.celery_worker(
                self._place, settings, name=name, queue=queue, slots=slots, pool=pool
            )
        if kind == "vault":
            return roles.vault(self._place, settings, name)
        if kind == "beat":
            return roles.beat(self._place, settings, name)
        return roles.bridge(self._place, settings, kind.removeprefix("bridge-"), name)

    @staticmethod
    def vault_settings(port: int) -> dict[str, str]:
        secrets = {"vault-admin": ADMIN_KEY, "vault-encryption": new_encryption_key()}
        return vault_settings(port, secrets)

    def kill_all(self) -> None:
        self._processes.kill_all()
