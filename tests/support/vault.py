"""A real vault process in front of the simulator, and a client that is nobody's library."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import urllib3
from cryptography.fernet import Fernet
from sqlalchemy import text
from sqlalchemy.engine import Engine

from sandbox import binaries, roles
from sandbox.ports import free_port
from sandbox.processes import Processes, RoleSpec
from tests.support.faults import FaultPoints
from tests.support.stripe import Stripe
from tests.support.waiting import wait_until

ADMIN_KEY = "admin-key-of-the-tests"
RUN = "2026-09"
RUN_KEYS = Fernet.generate_key().decode()
"""They encrypt the billing runs' vault keys."""
READY_WITHIN_S = 60.0
PATIENT: Mapping[str, str] = {"DATABASE_POOLED": "yes"}
"""Sessions without limits: nobody is told `busy` because another's commit was long in coming."""


class VaultReply:
    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str | None:
        """Of an error; None for a success."""
        value = self.json
        error = value.get("error") if isinstance(value, dict) else None
        return error.get("code") if error else None

    @property
    def forwarded(self) -> str | None:
        return self.headers.get("Vault-Forwarded")


class VaultProcess:
    """One vault: requests to it, its end and its freezing, and what its database says."""

    def __init__(self, processes: Processes, folder: Path, name: str, env: dict[str, str]) -> None:
        self._processes = processes
        self.name = name
        self.env = env
        self.url = f"http://{env['VAULT_LISTEN']}"
        self.log = folder / f"{name}.log"
        place = roles.base_environment(folder)
        self._spec = RoleSpec(
            name=name,
            command=(sys.executable, "-m", "vault", "serve"),
            directory=binaries.CHECKOUT,
            log=self.log,
            environment={**place, **env},
            grace_s=20.0,
        )
        self.http = urllib3.PoolManager(maxsize=100, retries=False, timeout=60)

    # -- process -------------------------------------------------------------------------

    def start(self) -> VaultProcess:
        self._processes.start(self._spec)
        wait_until(self._is_ready, READY_WITHIN_S, f"the vault is ready; log: {self.log}")
        return self

    def _is_ready(self) -> bool:
        if not self._processes.is_alive(self.name):
            raise AssertionError(f"the vault ended: {self.log.read_text()}")
        try:
            return self.http.request("GET", f"{self.url}/readyz").status == 200
        except urllib3.exceptions.HTTPError:
            return False

    @property
    def pid(self) -> int:
        return self._processes.pids()[self.name]

    def is_alive(self) -> bool:
        return self._processes.is_alive(self.name)

    def kill(self) -> None:
        self._processes.kill(self.name)

    def stop(self) -> None:
        self._processes.stop(self.name)

    def ask_to_stop(self) -> None:
        self._processes.ask_to_stop(self.name)

    def signal(self, number: int) -> None:
        self._processes.signal(self.name, number)

    def restart(self) -> None:
        self._processes.forget(self.name)
        self.start()

    # -- requests ------------------------------------------------------------------------

    def request(
        self,
        method: str,
        path: str,
        *,
        key: str | None = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> VaultReply:
        sent = dict(headers or {})
        if key is not None:
            sent["Authorization"] = f"Bearer {key}"
        reply = self.http.request(method, self.url + path, body=body, headers=sent)
        return VaultReply(reply.status, reply.headers, reply.data)

    def admin(
        self, path: str, body: Mapping[str, Any], admin_key: str | None = ADMIN_KEY
    ) -> VaultReply:
        return self.request("POST", path, key=admin_key, body=json.dumps(body).encode())

    def issue(self, run: str = RUN, cap_cents: int | None = 1_000_000, **more: Any) -> str:
        """A vault key for the budget of this run; opens it if it is not there."""
        body = {"vendor": "stripe", "label": f"run {run}", "billing_run": run, **more}
        if cap_cents is not None:
            body["cap_cents"] = cap_cents
        reply = self.admin("/vault/keys", body)
        assert reply.status == 200, reply.body
        return str(reply.json["vault_key"])

    def resolve(self, idempotency_key: str, outcome: str, **more: Any) -> VaultReply:
        return self.admin(f"/vault/holds/{idempotency_key}/resolve", {"outcome": outcome, **more})

    def create(
        self,
        key: str,
        charge_key: str,
        *,
        idempotency_key: str | None = None,
        endpoint: str = "payment_intents",
        headers: Mapping[str, str] | None = None,
        **fields: str,
    ) -> VaultReply:
        """A create as the workers send it; `fields` override parameters, "" leaves one out."""
        sent = {
            "Content-Type": "application/x-www-form-urlencoded",
            "Idempotency-Key": idempotency_key or charge_key,
            **(headers or {}),
        }
        body = urlencode(create_fields(charge_key, endpoint, **fields)).encode()
        return self.request("POST", f"/stripe/v1/{endpoint}", key=key, body=body, headers=sent)

    def get(self, key: str, path: str) -> VaultReply:
        return self.request("GET", f"/stripe{path}", key=key)


def create_fields(
    charge_key: str, endpoint: str = "payment_intents", **fields: str
) -> dict[str, str]:
    given = {
        "amount": "2500",
        "currency": "usd",
        "customer": "cus_good",
        "metadata[charge_key]": charge_key,
        "metadata[attempt_epoch]": "0",
        "metadata[billing_run]": RUN,
    }
    if endpoint == "payment_intents":
        given |= {"confirm": "true", "off_session": "true", "payment_method": "pm_card_visa"}
    else:
        given |= {"source": "card_visa"}
    names = {"run": "metadata[billing_run]", "epoch": "metadata[attempt_epoch]"}
    given |= {names.get(name, name): value for name, value in fields.items()}
    return {name: value for name, value in given.items() if value != ""}


def vaulted_settings(vault: VaultProcess, **env: str) -> dict[str, Any]:
    """What a worker is told that has no key of Stripe's own."""
    return {
        "VAULT_MODE": "self",
        "VAULT_URL": vault.url,
        "VAULT_ADMIN_KEY": ADMIN_KEY,
        "VAULT_ENCRYPTION_KEYS": RUN_KEYS,
        "STRIPE_API_KEY": "",
        "STRIPE_API_BASE": "http://127.0.0.1:9",
        **env,
    }


class Books:
    """What the database says of budgets and holds."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def budget(self, run: str = RUN, currency: str = "usd") -> dict[str, int]:
        found = self._rows(
            "SELECT cap_cents, settled_cents, held_cents FROM billing_runs "
            "WHERE billing_run = :run AND currency = :currency",
            run=run,
            currency=currency,
        )
        return found[0]

    def holds(self) -> list[dict[str, Any]]:
        return self._rows("SELECT * FROM vault_holds ORDER BY id")

    def hold(self, idempotency_key: str) -> dict[str, Any]:
        return self._rows(
            "SELECT * FROM vault_holds WHERE idempotency_key = :key", key=idempotency_key
        )[0]

    def keys(self) -> list[dict[str, Any]]:
        return self._rows("SELECT * FROM vault_keys ORDER BY id")

    def now(self) -> datetime:
        """The ledger's clock."""
        moment: datetime = self._rows("SELECT ledger_now() AS now")[0]["now"]
        return moment

    def everything(self) -> str:
        """All rows of the vault's tables, as text."""
        tables = ("billing_runs", "billing_run_events", "vault_keys", "vault_holds")
        return "".join(str(self._rows(f"SELECT * FROM {table}")) for table in tables)

    def set_run_state(self, state: str, run: str = RUN) -> None:
        self._do(
            "UPDATE billing_runs SET state = :state WHERE billing_run = :run", state=state, run=run
        )

    def expire_keys(self) -> None:
        self._do("UPDATE vault_keys SET expires_at = ledger_now()")

    def revoke_keys(self) -> None:
        self._do("UPDATE vault_keys SET revoked_at = ledger_now()")

    def revoke_keys_but_the_newest(self) -> None:
        self._do(
            "UPDATE vault_keys SET revoked_at = ledger_now() "
            "WHERE id < (SELECT max(id) FROM vault_keys)"
        )

    def forget_keys(self) -> None:
        """As if the vault had been restored from a copy without them."""
        self._do("DELETE FROM vault_keys")

    def forget_outcome(self, idempotency_key: str) -> None:
        """A settled hold holds again, as if its outcome had never been committed."""
        self._do(
            """WITH lost AS (
                UPDATE vault_holds SET state = 'unknown' WHERE idempotency_key = :key
                RETURNING run_id, amount_cents)
            UPDATE billing_runs r SET settled_cents = settled_cents - lost.amount_cents,
                held_cents = held_cents + lost.amount_cents
            FROM lost WHERE r.id = lost.run_id""",
            key=idempotency_key,
        )

    def give_back(self, idempotency_key: str) -> None:
        """A settled hold is released, as if absence at Stripe had been proved too soon."""
        self._do(
            """WITH lost AS (
                UPDATE vault_holds SET state = 'released' WHERE idempotency_key = :key
                RETURNING run_id, amount_cents)
            UPDATE billing_runs r SET settled_cents = settled_cents - lost.amount_cents
            FROM lost WHERE r.id = lost.run_id""",
            key=idempotency_key,
        )

    def forget_holds(self) -> None:
        """The vault's tables as in a copy from before the first hold."""
        self._do("DELETE FROM vault_holds")
        self._do("UPDATE billing_runs SET settled_cents = 0, held_cents = 0")

    def check(self) -> None:
        """Budgets are what their holds come to."""
        wrong = self._rows(
            """SELECT r.billing_run, r.currency FROM billing_runs r LEFT JOIN vault_holds h
               ON h.run_id = r.id GROUP BY r.id
               HAVING r.settled_cents <> COALESCE(
                       sum(h.amount_cents) FILTER (WHERE h.state = 'settled'), 0)
                   OR r.held_cents <> COALESCE(sum(h.amount_cents) FILTER (
                       WHERE h.state IN ('reserved', 'sent', 'unknown')), 0)"""
        )
        assert wrong == []

    def _rows(self, statement: str, **values: Any) -> list[dict[str, Any]]:
        with self.engine.connect() as connection:
            return [dict(row) for row in connection.execute(text(statement), values).mappings()]

    def _do(self, statement: str, **values: Any) -> None:
        with self.engine.connect() as connection:
            connection.execute(text(statement), values)


VaultStarter = Callable[..., VaultProcess]


@pytest.fixture
def vault_starter(
    tmp_path: Path, database_url: str, stripe: Stripe, fault_point: FaultPoints
) -> Iterator[VaultStarter]:
    """Starts vaults on one database; settings by keyword (`VAULT_CONCURRENCY="2"`)."""
    folder = tmp_path / "vaults"
    folder.mkdir()
    processes = Processes(folder)
    count = 0

    def start(*, wait: bool = True, **env: str) -> VaultProcess:
        nonlocal count
        count += 1
        settings = {
            "DATABASE_URL": database_url,
            "STRIPE_API_BASE": stripe.base_url,
            "STRIPE_API_KEY": "sk_test_upstream",
            "VAULT_MODE": "self",
            "VAULT_ADMIN_KEY": ADMIN_KEY,
            "VAULT_LISTEN": f"127.0.0.1:{free_port()}",
            "FAULTS_DIR": str(fault_point.folder),
            "LIMITS": "fast",
            **env,
        }
        vault = VaultProcess(processes, folder, f"vault-{count}", settings)
        return vault.start() if wait else vault

    yield start
    processes.kill_all()


@pytest.fixture
def vault(request: pytest.FixtureRequest, vault_starter: VaultStarter) -> VaultProcess:
    """A module's VAULT_ENV adds to its settings."""
    env: Mapping[str, str] = getattr(request.module, "VAULT_ENV", {})
    return vault_starter(**env)


@pytest.fixture
def books(engine: Engine) -> Books:
    return Books(engine)


def refused_start(env: dict[str, str]) -> str:
    """The one line of a vault that must not start."""
    done = subprocess.run(
        [sys.executable, "-m", "vault", "serve"],
        cwd=binaries.CHECKOUT,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("chargebridge: ")
    return line
