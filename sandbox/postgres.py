"""PostgreSQL from its wheel: where the data lives, who runs it, how it is made and started.

postgres refuses to run as root. There it runs as an ordinary account that exists already; where
that account cannot enter the checkout, data and a copy of the programs go to a private folder
under /var/tmp.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import psycopg
from psycopg import sql

from sandbox import binaries
from sandbox.files import write_atomically
from sandbox.ports import LOOPBACK
from sandbox.processes import Account, RoleSpec, SandboxError

USER = "chargebridge"
DATABASE = "chargebridge"
UNPRIVILEGED_UID = 65534
PRIVATE_PARENT = Path("/var/tmp")  # noqa: S108 - survives a reboot; ownership is checked
MAX_CONNECTIONS = 300
CONFIGURATION = {
    "unix_socket_directories": "",
    "max_connections": str(MAX_CONNECTIONS),
    "shared_buffers": "64MB",
    "fsync": "on",
    "synchronous_commit": "on",
    "timezone": "UTC",
    "log_timezone": "UTC",
    # Statement texts carry no values of ours, but a detail line would.
    "log_error_verbosity": "terse",
    "log_parameter_max_length_on_error": "0",
}


@dataclass(frozen=True)
class Postgres:
    """One cluster: programs, data folder and account."""

    installation: Path
    data: Path
    account: Account | None
    port: int
    password: str

    def url(self, database: str = DATABASE) -> str:
        return f"postgresql://{USER}:{self.password}@{LOOPBACK}:{self.port}/{database}"

    def make_cluster(self) -> None:
        """initdb, unless a whole cluster is there; the rest of a half-made one is removed."""
        made = self.data.with_name(self.data.name + ".made")
        if made.exists() and (self.data / "PG_VERSION").exists():
            return
        shutil.rmtree(self.data, ignore_errors=True)
        self.data.mkdir(mode=0o700)
        password_file = self.data.with_name("password")
        write_atomically(password_file, self.password, mode=0o600)
        try:
            for path in (self.data, password_file):
                self._give(path)
            self._initdb(password_file)
        finally:
            password_file.unlink()
        made.touch()

    def _give(self, path: Path) -> None:
        if self.account is not None:
            os.chown(path, self.account.uid, self.account.gid)

    def _initdb(self, password_file: Path) -> None:
        command = [
            *_named_user(),
            str(self.installation / "bin" / "initdb"),
            f"--pgdata={self.data}",
            f"--username={USER}",
            f"--pwfile={password_file}",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C",
            "--no-sync",
        ]
        account = self.account
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            cwd="/",
            env={"PATH": os.defpath, "LANG": "C", "TZ": "UTC"},
            user=None if account is None else account.uid,
            group=None if account is None else account.gid,
            extra_groups=None if account is None else [],
        )
        if done.returncode != 0:
            raise SandboxError(f"initdb failed: {done.stderr.strip()[-500:]}")

    def spec(self, log: Path, environment: dict[str, str]) -> RoleSpec:
        options = [f"-c{name}={value}" for name, value in CONFIGURATION.items()]
        place = [f"-D{self.data}", f"-clisten_addresses={LOOPBACK}", f"-cport={self.port}"]
        return RoleSpec(
            name="postgres",
            command=(str(self.installation / "bin" / "postgres"), *place, *options),
            # Any folder that its account can enter.
            directory=Path("/"),
            log=log,
            environment=environment,
            account=self.account,
            # Fast shutdown: roll back and go, without waiting for clients to leave.
            stop_signal=signal.SIGINT,
            before_start=self._before_start,
        )

    def _before_start(self) -> None:
        """Drops the pid file of a killed postmaster, whose pid may be anybody's by now."""
        pid_file = self.data / "postmaster.pid"
        try:
            pid = int(pid_file.read_text().splitlines()[0])
            process = psutil.Process(pid)
            ours = process.name() == "postgres" and Path(process.cwd()) == self.data
        except (FileNotFoundError, IndexError, ValueError, psutil.Error):
            # A process that may not be looked at is another user's.
            ours = False
        if not ours:
            pid_file.unlink(missing_ok=True)


def locate(directory: Path, port: int, password: str) -> Postgres:
    """Decides on account and folders for the cluster that belongs to a sandbox folder."""
    installation = binaries.postgres_installation()
    if os.geteuid() != 0:
        home = directory / "postgres"
        home.mkdir(exist_ok=True)
        return Postgres(installation, home / "data", None, port, password)
    account = _ordinary_account()
    reachable = _can_reach(account, directory) and _can_reach(account, installation / "bin")
    home = directory / "postgres" if reachable else private_folder(directory)
    home.mkdir(mode=0o711, exist_ok=True)
    home.chmod(0o711)
    if not reachable:
        installation = _copy_installation(home)
    return Postgres(installation, home / "data", account, port, password)


def private_folder_name(directory: Path) -> Path:
    """Where the data of a sandbox folder goes that an ordinary account cannot enter."""
    name = hashlib.sha256(str(directory).encode()).hexdigest()[:16]
    return PRIVATE_PARENT / f"chargebridge-{name}"


def private_folder(directory: Path) -> Path:
    """The same, made. Raises SandboxError when somebody else made it before."""
    folder = private_folder_name(directory)
    try:
        folder.mkdir(mode=0o711)
    except FileExistsError:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise SandboxError(f"{folder} belongs to somebody else") from None
    return folder


def _named_user() -> list[str]:
    """A prefix for commands that want their user to be listed, where ours is not."""
    if os.geteuid() == 0:
        return []
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        account = _ordinary_account()
        script = str(Path(__file__).with_name("named_user.py"))
        return [sys.executable, "-I", "-S", script, str(account.uid), str(account.gid), "--"]
    return []


def remove_private_folder(directory: Path) -> None:
    folder = private_folder_name(directory)
    if folder.exists() and folder.lstat().st_uid == os.geteuid():
        shutil.rmtree(folder)


def create_database(admin_url: str, name: str, template: str | None = None) -> None:
    """Creates a database, as a copy of `template` if given, unless it is there."""
    with psycopg.connect(admin_url, autocommit=True) as link:
        query = "SELECT 1 FROM pg_database WHERE datname = %s"
        if link.execute(query, [name]).fetchone() is not None:
            return
        origin = sql.Identifier(template or "template1")
        link.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), origin))


def drop_database(admin_url: str, name: str) -> None:
    """Drops it with whoever is still connected."""
    with psycopg.connect(admin_url, autocommit=True) as link:
        link.execute(
            sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
        )


def _ordinary_account() -> Account:
    try:
        entry = pwd.getpwnam("nobody")
    except KeyError:
        return Account(UNPRIVILEGED_UID, UNPRIVILEGED_UID)
    return Account(entry.pw_uid, entry.pw_gid)


def _can_reach(account: Account, path: Path) -> bool:
    """Whether every folder on the way lets the account through."""
    for folder in (path, *path.parents):
        found = folder.stat()
        if found.st_uid == account.uid:
            needed = stat.S_IXUSR
        elif found.st_gid == account.gid:
            needed = stat.S_IXGRP
        else:
            needed = stat.S_IXOTH
        if not found.st_mode & needed:
            return False
    return True


def _copy_installation(home: Path) -> Path:
    source, libraries = binaries.postgres_installation(), binaries.postgres_libraries()
    # The programs look for their libraries beside the package, so the copy keeps its shape.
    package = home / "programs" / source.parent.name
    complete = home / "programs" / "complete"
    if not complete.exists():
        shutil.rmtree(home / "programs", ignore_errors=True)
        shutil.copytree(source, package / source.name)
        shutil.copytree(libraries, home / "programs" / libraries.name)
        complete.touch()
    return package / source.name
