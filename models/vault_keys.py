"""The vault's own keys: made from chance, kept as hashes, pointing at a billing run's budget."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import text

from models.database import rows

if TYPE_CHECKING:
    from sqlalchemy import Engine

KEY_PREFIX: Final = "vk_"
KEY_BYTES: Final = 32
KEY_LIFE_S: Final = 7 * 24 * 3600
"""By default, since runs span days; ending earlier gives no safety that revoking does not."""
MAX_KEY_LIFE_S: Final = 90 * 24 * 3600
MAX_LABEL_CHARACTERS: Final = 255

ENDPOINTS: Final = (
    "POST /v1/payment_intents",
    "POST /v1/payment_intents/{id}/cancel",
    "GET /v1/payment_intents",
    "GET /v1/payment_intents/{id}",
    "POST /v1/charges",
    "GET /v1/charges",
    "GET /v1/charges/{id}",
    "GET /v1/customers/{id}",
    "GET /v1/account",
)
"""Every call that the pipeline makes, and so every call that a vault key can be good for."""


@dataclass(frozen=True, slots=True)
class VaultKey:
    """A key as the vault knows it: everything but the key."""

    id: int
    billing_run: str
    currency: str
    label: str
    endpoints: Sequence[str]
    expires_at: datetime
    revoked_at: datetime | None
    created_at: datetime


def new_vault_key() -> str:
    """A fresh key of 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def key_hash(vault_key: str) -> str:
    """What is stored of a key. It is not guessable, so a plain digest keeps it."""
    return sha256(vault_key.encode()).hexdigest()


_COLUMNS: Final = (
    "k.id, r.billing_run, r.currency, k.label, k.endpoints, k.expires_at, k.revoked_at, "
    "k.created_at"
)
_ISSUE: Final = text(f"""
    WITH issued AS (
        INSERT INTO vault_keys (run_id, key_hash, label, endpoints, expires_at)
        SELECT id, :key_hash, :label, :endpoints,
            COALESCE(CAST(:expires_at AS timestamptz),
                     ledger_now() + make_interval(secs => :life_s))
        FROM billing_runs WHERE id = :run_id
        RETURNING *)
    SELECT {_COLUMNS} FROM issued k JOIN billing_runs r ON r.id = k.run_id""")
_REVOKE: Final = text(f"""
    WITH revoked AS (
        UPDATE vault_keys SET revoked_at = COALESCE(revoked_at, ledger_now())
        WHERE id = :id RETURNING *)
    SELECT {_COLUMNS} FROM revoked k JOIN billing_runs r ON r.id = k.run_id""")
_LIST: Final = text(f"""
    SELECT {_COLUMNS} FROM vault_keys k JOIN billing_runs r ON r.id = k.run_id
    WHERE k.id > :after_id AND (CAST(:billing_run AS text) IS NULL OR r.billing_run = :billing_run)
    ORDER BY k.id LIMIT :limit""")


class VaultKeys:
    """The keys of one database."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def issue(
        self,
        run_id: int,
        *,
        label: str,
        endpoints: Sequence[str] = ENDPOINTS,
        expires_at: datetime | None = None,
    ) -> tuple[str, VaultKey]:
        """Make a key for a run's budget. The key itself is given out here and never again."""
        vault_key = new_vault_key()
        values = {
            "run_id": run_id,
            "key_hash": key_hash(vault_key),
            "label": label,
            "endpoints": list(endpoints),
            "expires_at": expires_at,
            "life_s": KEY_LIFE_S,
        }
        return vault_key, self._key(rows(self.engine, _ISSUE, values)[0])

    def revoke(self, key_id: int) -> VaultKey | None:
        """Stop a key's new holds for good; replays, cancels and reads still pass."""
        found = rows(self.engine, _REVOKE, {"id": key_id})
        return self._key(found[0]) if found else None

    def list(
        self, *, limit: int, after_id: int = 0, billing_run: str | None = None
    ) -> Sequence[VaultKey]:
        """Keys in the order of their making."""
        values = {"limit": limit, "after_id": after_id, "billing_run": billing_run}
        return [self._key(row) for row in rows(self.engine, _LIST, values)]

    @staticmethod
    def _key(row: Any) -> VaultKey:
        return VaultKey(**row)
