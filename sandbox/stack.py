"""One embedded stack in one folder: its settings, its roles, and how they come up in order.

`Stack` knows what to run; a keeper runs it: `Processes` in this very process (tests, demo), or
the supervisor in the background (`python -m sandbox up`).
"""

from __future__ import annotations

import base64
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal, Protocol

import redis

from sandbox import binaries, clock, health, postgres, roles
from sandbox.envfile import write_env
from sandbox.files import read_json, write_json
from sandbox.ports import LOOPBACK, choose_ports
from sandbox.processes import Processes, RoleSpec, SandboxError, kill_leftovers, leftovers

HEALTHY_WITHIN_S = 60.0
MIGRATE_WITHIN_S = 120.0
POLL_S = 0.1
STRIPE_KEY = "sk_test_sandbox"
DEFAULT_VAULT_MODE = "self"
AUTO_OPEN_CENTS = 1_000_000_000_000
"""So that the sandbox charges any billing run without a run being opened first."""

Limits = Literal["default", "fast"]


class Keeper(Protocol):
    """What a stack needs from whoever runs its processes."""

    def start_role(self, name: str) -> None: ...
    def stop_role(self, name: str, *, kill: bool = False) -> None: ...
    def running(self) -> dict[str, int]:
        """Roles that run now, with their pids."""
        ...


class Stack:
    """Names, ports, secrets and role commands of one sandbox folder.

    `env` adds to or overrides the settings. Ports, secrets, limits and `env` are kept in the
    folder: `Stack.load` finds them again.
    """

    def __init__(
        self,
        directory: Path,
        *,
        limits: Limits = "default",
        env: Mapping[str, str] | None = None,
        names: Iterable[str] = roles.ROLES,
    ) -> None:
        self.directory = directory.resolve()
        self.directory.mkdir(mode=0o711, parents=True, exist_ok=True)
        self._configuration = self.directory / "stack.json"
        kept = read_json(self._configuration) or {}
        self.ports = {name: int(port) for name, port in kept.get("ports", {}).items()}
        self.secrets = {str(k): str(v) for k, v in kept.get("secrets", {}).items()}
        self.limits = limits
        self.extra = dict(env or {})
        self.vault_mode = self.extra.get("VAULT_MODE", DEFAULT_VAULT_MODE)
        self.names = tuple(n for n in names if n != roles.VAULT or self.vault_mode == "self")
        self._make_secrets()

    @classmethod
    def load(cls, directory: Path) -> Stack:
        """The stack of an existing folder as it was last brought up."""
        kept = read_json(directory.resolve() / "stack.json")
        if kept is None:
            raise SandboxError("there is no stack here: run `python -m sandbox up`")
        return cls(directory, limits=kept["limits"], env=kept["env"], names=kept["roles"])

    # --- configuration ---------------------------------------------------------------------

    def _make_secrets(self) -> None:
        for name in ("postgres", "flower", "vault-admin"):
            self.secrets.setdefault(name, secrets.token_urlsafe(24))
        self.secrets.setdefault("vault-encryption", new_encryption_key())

    def prepare(self) -> None:
        """Chooses ports, keeps the configuration and makes the database cluster.

        Only while nothing of this stack runs.
        """
        if read_json(self._configuration) is None:
            self._drop_earlier_data()
        self.ports = choose_ports(roles.PORTS, self.ports)
        self.save()
        for folder in ("logs", "home"):
            (self.directory / folder).mkdir(exist_ok=True)
        if "postgres" in self.names:
            self.postgres.make_cluster()

    def _drop_earlier_data(self) -> None:
        """A removed folder may have left a cluster elsewhere, whose password is gone with it."""
        if self.leftovers():
            raise SandboxError("an earlier stack still runs here: end its `sandbox.supervisor`")
        postgres.remove_private_folder(self.directory)

    def save(self) -> None:
        kept = {
            "ports": self.ports,
            "secrets": self.secrets,
            "limits": self.limits,
            "env": self.extra,
            "roles": self.names,
        }
        write_json(self._configuration, kept)

    @property
    def postgres(self) -> postgres.Postgres:
        return postgres.locate(self.directory, self.ports["postgres"], self.secrets["postgres"])

    @property
    def settings(self) -> dict[str, str]:
        """The environment of the product against this stack (DATABASE_URL and so on)."""
        address = {name: f"{LOOPBACK}:{port}" for name, port in self.ports.items()}
        return {
            "DATABASE_URL": self.postgres.url(),
            "CELERY_BROKER_URL": self.redis_url(0),
            "REDIS_URL": self.redis_url(1),
            "REDIS_STREAM": "billing-stream",
            "REDIS_GROUP": "billing-group",
            "NSQD_TCP_ADDRESS": address["nsqd-tcp"],
            "NSQD_HTTP_ADDRESS": address["nsqd-http"],
            "NSQ_LOOKUPD_HTTP_ADDRESS": address["nsqlookupd-http"],
            "NSQ_TOPIC": "billing-events",
            "NSQ_CHANNEL": "stripe-processor",
            "STRIPE_API_BASE": f"http://{address['stripe']}",
            "STRIPE_API_KEY": STRIPE_KEY,
            # The simulator has no limits of its own to keep.
            "STRIPE_RATE_PER_S": "2000",
            "STRIPE_ENDPOINT_RATE_PER_S": "1000",
            **self._vault_settings(),
            "FLOWER_URL": f"http://{address['flower']}",
            "FLOWER_BASIC_AUTH": f"operator:{self.secrets['flower']}",
            "LIMITS": self.limits,
            **self.extra,
        }

    def _vault_settings(self) -> dict[str, str]:
        """All the names, whatever the mode: an empty one says that there is none."""
        if self.vault_mode != "self":
            return {"VAULT_MODE": self.vault_mode, "VAULT_URL": "", "VAULT_ADMIN_KEY": ""}
        return vault_settings(self.ports["vault"], self.secrets)

    def redis_url(self, database: int) -> str:
        return f"redis://{LOOPBACK}:{self.ports['redis']}/{database}"

    @property
    def place(self) -> roles.Place:
        return roles.Place(self.directory, roles.base_environment(self.directory / "home"))

    def spec(self, name: str) -> RoleSpec:
        """How a role is started. Raises SandboxError for a role there is not."""
        place, settings, ports = self.place, self.settings, self.ports
        own = worker_settings(settings)
        log = self.directory / "logs" / "postgres.log"
        makers: dict[str, Callable[[], RoleSpec]] = {
            "postgres": lambda: self.postgres.spec(log, dict(place.base_environment)),
            "redis": lambda: roles.redis(place, ports["redis"]),
            "nsqlookupd": lambda: roles.nsqlookupd(place, ports),
            "nsqd": lambda: roles.nsqd(place, ports),
            "stripe": lambda: roles.stripe(place, ports["stripe"]),
            "vault": lambda: roles.vault(place, settings),
            "worker": lambda: roles.worker(place, own),
            "worker-control": lambda: roles.worker_control(place, own),
            "beat": lambda: roles.beat(place, settings),
            "bridge-nsq": lambda: roles.bridge(place, settings, "nsq"),
            "bridge-redis": lambda: roles.bridge(place, settings, "redis"),
            "flower": lambda: roles.flower(place, settings, ports["flower"]),
        }
        self.require(name)
        return makers[name]()

    def require(self, name: str) -> None:
        if name not in self.names:
            raise SandboxError(f"no role {name!r}; there are {', '.join(self.names)}")

    # --- health ----------------------------------------------------------------------------

    def problem(self, name: str, started: float = 0.0) -> str | None:
        """What keeps a role from being healthy, or None. `started`: epoch seconds, for beat."""
        settings, place = self.settings, self.place
        broker = settings["CELERY_BROKER_URL"]
        checks: dict[str, Callable[[], str | None]] = {
            "postgres": self._database_problem,
            "redis": lambda: health.redis_server(self.redis_url(0)),
            "nsqlookupd": lambda: health.answers(self.url("nsqlookupd-http", "/ping")),
            "nsqd": lambda: health.answers(self.url("nsqd-http", "/ping")),
            "stripe": lambda: health.answers(self.url("stripe", "/_sim/health")),
            "vault": lambda: health.answers(self.url("vault", "/readyz")),
            "worker": lambda: health.celery_worker(broker, "worker"),
            "worker-control": lambda: health.celery_worker(broker, "worker-control"),
            "beat": lambda: health.beat(roles.beat_schedule(place), started),
            "bridge-nsq": lambda: health.bridge_nsq(settings),
            "bridge-redis": lambda: health.bridge_redis(settings),
            "flower": lambda: health.listens(settings["FLOWER_URL"]),
        }
        return checks[name]()

    def _database_problem(self) -> str | None:
        return health.postgres({"DATABASE_URL": self.postgres.url("postgres")})

    def url(self, port: str, path: str = "") -> str:
        return f"http://{LOOPBACK}:{self.ports[port]}{path}"

    def wait_healthy(
        self, keeper: Keeper, names: Iterable[str], timeout_s: float = HEALTHY_WITHIN_S
    ) -> None:
        """Raises SandboxError, with the last line of each log, when the time is over."""
        begun = time.time()
        deadline = time.monotonic() + timeout_s
        waiting: dict[str, str] = dict.fromkeys(names, "not asked yet")
        pause = threading.Event()
        while waiting:
            running = keeper.running()
            for name in list(waiting):
                trouble = "is not running"
                if name in running:
                    trouble = self.problem(name, begun - HEALTHY_WITHIN_S) or ""
                if not trouble:
                    del waiting[name]
                else:
                    waiting[name] = trouble
            if waiting and time.monotonic() > deadline:
                raise SandboxError("; ".join(self._complaint(n, t) for n, t in waiting.items()))
            if waiting:
                pause.wait(POLL_S)

    def _complaint(self, name: str, trouble: str) -> str:
        log = self.directory / "logs" / f"{name}.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        last = f" (last line of {log}: {lines[-1][:300]})" if lines else ""
        return f"{name}: {trouble}{last}"

    # --- up, down --------------------------------------------------------------------------

    def bring_up(self, keeper: Keeper, say: Callable[[str], None]) -> None:
        """Starts what does not run yet, in order, and returns when all of it is healthy."""
        self._start(keeper, roles.SERVICES)
        if "postgres" in self.names:
            say("migrating the ledger")
            self.create_database(postgres.DATABASE)
            self.migrate(self.settings)
            clock.install(self.settings["DATABASE_URL"])
        self.create_queues()
        if set(self.names) - set(roles.SERVICES):
            vault = "the vault, " if roles.VAULT in self.names else ""
            say(f"starting {vault}workers, beat, bridges and Flower")
        for stage in ((roles.VAULT,), roles.APPLICATION, (roles.FLOWER,)):
            self._start(keeper, stage)
        write_env(self.directory / "env", self.settings)

    def _start(self, keeper: Keeper, stage: Iterable[str]) -> None:
        """Starts what there is of one stage, and returns when it is healthy."""
        names = [name for name in stage if name in self.names]
        running = keeper.running()
        for name in names:
            if name not in running:
                keeper.start_role(name)
        self.wait_healthy(keeper, names)

    def create_database(self, name: str, template: str | None = None) -> None:
        """Creates it unless it is there."""
        postgres.create_database(self.postgres.url("postgres"), name, template)

    def migrate(self, settings: Mapping[str, str]) -> None:
        """`alembic upgrade head` with these settings; raises SandboxError with its last line."""
        command = [sys.executable, "-m", "alembic", "upgrade", "head"]
        done = subprocess.run(
            command,
            check=False,
            cwd=binaries.CHECKOUT,
            env={**self.place.base_environment, **settings},
            capture_output=True,
            text=True,
            timeout=MIGRATE_WITHIN_S,
        )
        if done.returncode != 0:
            raise SandboxError(f"the migrations failed: {done.stderr.strip()[-500:]}")

    def create_queues(self) -> None:
        """Topic and channel, stream and group: before any producer, so that nothing is lost."""
        if "nsqd" in self.names:
            create_channel(self.settings)
        if "redis" in self.names:
            create_group(self.settings)

    # --- what an earlier run left ----------------------------------------------------------

    def data_folders(self) -> list[Path]:
        """Working folders of the programs that hide their environment."""
        hidden = postgres.private_folder_name(self.directory) / "data"
        return [self.directory / "redis", self.directory / "postgres" / "data", hidden]

    def leftovers(self) -> list[int]:
        return [process.pid for process in leftovers(self.directory, self.data_folders())]

    def kill_leftovers(self) -> int:
        return kill_leftovers(self.directory, self.data_folders())

    def wipe(self) -> None:
        """Removes all data of a stack that does not run, ports and secrets included."""
        shutil.rmtree(self.directory, ignore_errors=True)
        postgres.remove_private_folder(self.directory)
        self.directory.mkdir(mode=0o711, parents=True, exist_ok=True)


class LocalKeeper:
    """Runs the roles of a stack as children of this process; restarts nothing by itself."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.processes = Processes(stack.directory)

    def start_role(self, name: str) -> None:
        self.processes.start(self.stack.spec(name))

    def stop_role(self, name: str, *, kill: bool = False) -> None:
        if kill:
            self.processes.kill(name)
        else:
            self.processes.stop(name)

    def running(self) -> dict[str, int]:
        return self.processes.pids()


def new_encryption_key() -> str:
    """A Fernet key: 32 random bytes, URL-safe base64."""
    return base64.urlsafe_b64encode(secrets.token_bytes(32)).decode()


def vault_settings(port: int, known: Mapping[str, str]) -> dict[str, str]:
    """What the self-hosted vault and its clients are told."""
    return {
        "VAULT_MODE": "self",
        "VAULT_URL": f"http://{LOOPBACK}:{port}",
        "VAULT_LISTEN": f"{LOOPBACK}:{port}",
        "VAULT_ADMIN_KEY": known["vault-admin"],
        "VAULT_ENCRYPTION_KEYS": known["vault-encryption"],
        "RUN_AUTO_OPEN_EXPECTED_CENTS": str(AUTO_OPEN_CENTS),
    }


def worker_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """What workers are told: behind a vault they have no way to Stripe of their own."""
    around = ("STRIPE_API_KEY", "STRIPE_API_BASE") if settings["VAULT_MODE"] == "self" else ()
    return {name: value for name, value in settings.items() if name not in around}


def create_channel(settings: Mapping[str, str]) -> None:
    base = f"http://{settings['NSQD_HTTP_ADDRESS']}"
    topic, channel = settings["NSQ_TOPIC"], settings["NSQ_CHANNEL"]
    health.request("POST", f"{base}/topic/create?topic={topic}")
    health.request("POST", f"{base}/channel/create?topic={topic}&channel={channel}")


def create_group(settings: Mapping[str, str]) -> None:
    stream, group = settings["REDIS_STREAM"], settings["REDIS_GROUP"]
    with redis.Redis.from_url(settings["REDIS_URL"]) as client:
        try:
            client.xgroup_create(stream, group, id="0", mkstream=True)
        except redis.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise
