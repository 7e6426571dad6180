"""The one vault key of a billing run, kept encrypted so that all workers can share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Final

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from models import billing_runs_sql as sql
from models.billing_runs import BillingRuns, Run, RunState
from models.database import rows
from models.errors import ConfigurationError
from models.vault_keys import ENDPOINTS, KEY_LIFE_S, key_hash, new_vault_key

if TYPE_CHECKING:
    from models.settings import Settings

LABEL: Final = "billing run"
"""Of the keys that runs share; renewing ends only those."""
STORE_TRIES: Final = 3

Issue = Callable[[Run], str]
"""Asks a hosted vault for a key; the self-hosted one shares our database and needs no asking."""


@dataclass(frozen=True, slots=True)
class RunKey:
    """What a worker needs to spend on a run."""

    vault_key: str = field(repr=False)
    expires_at: datetime | None
    run: Run

    @property
    def state(self) -> RunState:
        return self.run.state


class RunKeys:
    """Vault keys of billing runs. `issue` is None with the self-hosted vault."""

    def __init__(self, runs: BillingRuns, encryption_keys: str, issue: Issue | None = None) -> None:
        self.runs = runs
        self._cipher = cipher(encryption_keys)
        self._issue = issue

    @classmethod
    def from_settings(
        cls, runs: BillingRuns, settings: Settings, issue: Issue | None = None
    ) -> RunKeys:
        """Raises ConfigurationError without VAULT_ENCRYPTION_KEYS."""
        settings.require("vault_encryption_keys")
        return cls(runs, settings.vault_encryption_keys, issue)

    def find(
        self, billing_run: str, currency: str, auto_open_expected_cents: int = 0
    ) -> RunKey | None:
        """The run's key as it is now; None without a run. A run without a key gets one.

        `auto_open_expected_cents`: what a run that is not there is opened with; 0 opens none.
        """
        run = self.runs.find(billing_run, currency)
        if run is None and auto_open_expected_cents:
            run = self.runs.find_or_open(billing_run, currency, auto_open_expected_cents)
        return None if run is None else self.of(run)

    def of(self, run: Run) -> RunKey:
        """The key of a run, made at the first time of asking, once however many ask."""
        for _ in range(STORE_TRIES):
            if run.vault_key_encrypted is not None:
                key = self._decrypt(run.vault_key_encrypted)
                return RunKey(key, run.vault_key_expires_at, run)
            run = self._store(run, "key") or self.runs.get(run.billing_run, run.currency)
        raise AssertionError("a key that was stored is read back")

    def renew(self, billing_run: str, currency: str) -> RunKey:
        """A new key for the same budget; the old one takes no new holds. Raises NotFound."""
        run = self.runs.get(billing_run, currency)
        renewed = self._store(run, "renew")
        # Somebody renewed it at the same moment: theirs is as new as ours.
        return self.of(renewed or self.runs.get(billing_run, currency))

    def reencrypt(self) -> int:
        """Encrypt every stored key with the first of the encryption keys; returns how many."""
        count, after_id = 0, 0
        while runs := self.runs.list(after_id=after_id):
            after_id = runs[-1].id
            count += sum(self._reencrypt(run) for run in runs)
        return count

    def _reencrypt(self, run: Run) -> bool:
        if run.vault_key_encrypted is None:
            return False
        key = self._decrypt(run.vault_key_encrypted)
        values = {
            "id": run.id,
            "before": run.vault_key_encrypted,
            "encrypted": self._cipher.encrypt(key.encode()).decode(),
        }
        return bool(rows(self.runs.engine, sql.REENCRYPT, values))

    def _store(self, run: Run, move: str) -> Run | None:
        """Give the run a key in place of the one it was read with; None if that has changed."""
        vault_key = new_vault_key() if self._issue is None else self._issue(run)
        values = {
            "id": run.id,
            "replaces": run.vault_key_encrypted,
            "encrypted": self._cipher.encrypt(vault_key.encode()).decode(),
            "key_hash": key_hash(vault_key) if self._issue is None else None,
            "label": LABEL,
            "endpoints": list(ENDPOINTS),
            "life_s": KEY_LIFE_S,
            "move": move,
            "actor": self.runs.actor,
            "reason": None,
        }
        stored = rows(self.runs.engine, sql.STORE_KEY, values)
        return self.runs.get(run.billing_run, run.currency) if stored else None

    def _decrypt(self, encrypted: str) -> str:
        try:
            return self._cipher.decrypt(encrypted).decode()
        except InvalidToken:
            raise ConfigurationError(
                "VAULT_ENCRYPTION_KEYS: none of them decrypts the key of a billing run"
            ) from None


def cipher(encryption_keys: str) -> MultiFernet:
    """The first key encrypts, all decrypt. Raises ConfigurationError for none or a bad one."""
    keys: Sequence[str] = [key.strip() for key in encryption_keys.split(",") if key.strip()]
    if not keys:
        raise ConfigurationError("VAULT_ENCRYPTION_KEYS is not set")
    try:
        return MultiFernet([Fernet(key) for key in keys])
    except ValueError:
        raise ConfigurationError("VAULT_ENCRYPTION_KEYS holds one that is no Fernet key") from None
