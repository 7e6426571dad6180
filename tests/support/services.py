"""Real PostgreSQL, Redis, nsqd and the Stripe simulator for one pytest process.

Each starts on first use, in a temporary folder, and dies with pytest, however pytest ends.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import redis as redis_client

from sandbox import clock, health, postgres, roles
from sandbox.ports import free_port
from sandbox.processes import Processes, RoleSpec
from sandbox.stack import LocalKeeper, Stack
from tests.support.waiting import wait_until

PREFIX = "chargebridge-tests-"
TEMPLATE = "template_ledger"
READY_WITHIN_S = 60.0
OWNER_LOCK = "owner.lock"
STARTED_WITH = {"nsqd": ("nsqlookupd",)}


class Services:
    """The services of this pytest process. `need(name)` starts one; tests may kill them."""

    def __init__(self, directory: Path) -> None:
        self.stack = Stack(
            directory, limits="fast", names=roles.SERVICES, env={"VAULT_MODE": "off"}
        )
        self.keeper = LocalKeeper(self.stack)
        self._wanted: list[str] = []
        self._counter = itertools.count(1)
        # Database 0 stays empty: it is where a client that was told nothing would write.
        self._redis_numbers = itertools.cycle(range(1, roles.REDIS_DATABASES))
        self._lasting: set[str] = set()
        self._template_made = False
        self.stack.prepare()

    @property
    def directory(self) -> Path:
        return self.stack.directory

    @property
    def processes(self) -> Processes:
        return self.keeper.processes

    def number(self) -> int:
        """A number that no earlier caller got."""
        return next(self._counter)

    # --- single services -------------------------------------------------------------------

    def need(self, *names: str) -> None:
        """Starts what does not run yet and returns when it is healthy."""
        for name in names:
            for other in (*STARTED_WITH.get(name, ()), name):
                if other not in self._wanted:
                    self._wanted.append(other)
                    self.start(other)

    def start(self, name: str) -> None:
        if name == "postgres":
            self._wait_sessions_ended()
        self.keeper.start_role(name)
        self.stack.wait_healthy(self.keeper, [name], READY_WITHIN_S)

    def _wait_sessions_ended(self) -> None:
        """Those of a killed PostgreSQL end by themselves. Until then one that has work goes on
        with it, and no other server can start beside them."""
        wait_until(lambda: not self._of_postgres(), READY_WITHIN_S, "its sessions end")

    def _of_postgres(self) -> list[psutil.Process]:
        """All its processes: each session is in a group of its own."""
        folders, found = self.stack.data_folders(), []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.name() == "postgres" and Path(process.cwd()) in folders:
                    found.append(process)
        return found

    def stop(self, name: str) -> None:
        """An orderly end."""
        self.keeper.stop_role(name)

    def kill(self, name: str) -> None:
        """SIGKILL to the whole group; returns when nobody answers any more."""
        self.keeper.stop_role(name, kill=True)
        if name == "postgres":
            self._wait_sessions_ended()

    def freeze(self, name: str) -> None:
        """It answers nobody from here on, whoever has a connection."""
        self._signal(name, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self._signal(name, signal.SIGCONT)

    def _signal(self, name: str, number: int) -> None:
        self.processes.signal(name, number)
        if name == "postgres":
            for process in self._of_postgres():
                with suppress(psutil.Error):
                    process.send_signal(number)

    def heal(self) -> None:
        """Brings back what a test has killed, stopped or frozen."""
        for name in self._wanted:
            self.thaw(name)
            if not self.processes.is_alive(name):
                self.processes.forget(name)
                self.start(name)

    def close(self) -> None:
        self.processes.kill_all()
        self.stack.wipe()

    # --- what tests get of them --------------------------------------------------------------

    def new_database(self) -> str:
        """The URL of a fresh, migrated database with a ledger clock that can be moved."""
        self.need("postgres")
        if not self._template_made:
            self._make_template()
        name = f"test_{self.number()}"
        self.stack.create_database(name, template=TEMPLATE)
        return self.stack.postgres.url(name)

    def new_empty_database(self) -> str:
        """The URL of a database without any table."""
        self.need("postgres")
        name = f"empty_{self.number()}"
        self.stack.create_database(name)
        return self.stack.postgres.url(name)

    def new_redis_database(self, *, lasting: bool = False) -> str:
        """The URL of an empty Redis database.

        Hundreds of calls later it is another caller's; a lasting one not before it is given back.
        """
        self.need("redis")
        urls = map(self.stack.redis_url, self._redis_numbers)
        url = next(url for url in urls if url not in self._lasting)
        if lasting:
            self._lasting.add(url)
        with redis_client.Redis.from_url(url) as client:
            client.flushdb()
        return url

    def give_back(self, *redis_urls: str) -> None:
        self._lasting.difference_update(redis_urls)

    def drop_database(self, url: str) -> None:
        postgres.drop_database(self.stack.postgres.url("postgres"), url.rpartition("/")[2])

    def _make_template(self) -> None:
        self.stack.create_database(TEMPLATE)
        url = self.stack.postgres.url(TEMPLATE)
        self.stack.migrate({"DATABASE_URL": url})
        clock.install(url)
        self._template_made = True

    def another_nsqd(self, *options: str) -> dict[str, str]:
        """Starts one more nsqd with options of its own; returns its settings."""
        self.need("nsqd")
        name = f"nsqd-{self.number()}"
        ports = {**self.stack.ports, "nsqd-tcp": free_port(), "nsqd-http": free_port()}
        place = roles.Place(
            self.directory / "more" / name, roles.base_environment(self.directory / "home")
        )
        # With a certificate nsqd also opens this one, at a fixed port unless told.
        https = f"--https-address=127.0.0.1:{free_port()}"
        spec = roles.nsqd(place, ports, (https, *options))
        self.processes.start(rename(spec, name))
        settings = {
            "NSQD_TCP_ADDRESS": f"127.0.0.1:{ports['nsqd-tcp']}",
            "NSQD_HTTP_ADDRESS": f"127.0.0.1:{ports['nsqd-http']}",
            "NSQ_LOOKUPD_HTTP_ADDRESS": "",
        }
        wait_until(
            lambda: not _http_problem(settings["NSQD_HTTP_ADDRESS"]), READY_WITHIN_S, "nsqd is up"
        )
        return settings


def rename(spec: RoleSpec, name: str) -> RoleSpec:
    return RoleSpec(**{**vars(spec), "name": name, "log": spec.log.with_name(f"{name}.log")})


def _http_problem(address: str) -> str | None:
    return health.answers(f"http://{address}/ping")


@contextmanager
def running_services() -> Iterator[Services]:
    """Services in a folder of their own, which is removed afterwards."""
    remove_abandoned_folders()
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))
    # The account that runs PostgreSQL for root must get through.
    directory.chmod(0o711)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Not before it is held: a free one says that its folder is abandoned.
        (directory / "lock").rename(directory / OWNER_LOCK)
        services = Services(directory / "stack")
        try:
            yield services
        finally:
            services.close()
    shutil.rmtree(directory, ignore_errors=True)


def remove_abandoned_folders() -> None:
    """Folders of pytest processes that were killed; a live one holds its lock."""
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            if directory.stat().st_uid != os.geteuid():
                continue
            with (directory / OWNER_LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (FileNotFoundError, BlockingIOError):
            # Not whole yet, held, or just being removed by its owner or by another such look.
            continue
        shutil.rmtree(directory, ignore_errors=True)
