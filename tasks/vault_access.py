"""Which vault key a request goes out with: that of its billing run, which all workers share.

Keys are read from the ledger's database and kept for a while. A refused key is read again before
anybody believes the refusal: it may have been renewed meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from models.billing_runs import BillingRuns, RunState
from models.errors import ConfigurationError, StateForbids
from models.ledger import boot_clock_s
from models.run_keys import RunKey, RunKeys
from models.vault_wire import VaultUnavailable, VaultWire
from tasks.errors import StripeUnavailable

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from models.settings import Settings

KEPT_S: Final = 300.0
"""The self-hosted vault itself refuses what has changed since."""
HOSTED_KEPT_S: Final = 5.0
"""A hosted vault knows no runs: whether one is closed is seen here, and no later than this."""
MAX_KEPT: Final = 1_000
"""Keys that one process keeps."""
STALE: Final = frozenset({"key_expired", "key_unknown", "key_revoked"})
"""Refusals that a renewed key may not meet."""
NO_BILLING_RUN: Final = "no_billing_run"


@dataclass(frozen=True, slots=True)
class _Kept:
    key: RunKey
    until_s: float


class VaultAccess:
    """Keys of billing runs for one process. Threads may share it."""

    def __init__(
        self, keys: RunKeys, url: str, *, auto_open_expected_cents: int = 0, hosted: bool = False
    ) -> None:
        self.hosted = hosted
        self.url = f"{url.rstrip('/')}/stripe"
        self.key_id_source = f"vault:{url.rstrip('/')}" if hosted else "vault"
        """The vault itself guards against another account key; to a worker it is one upstream."""
        self._keys = keys
        self._auto_open = auto_open_expected_cents
        self._kept_s = HOSTED_KEPT_S if hosted else KEPT_S
        self._kept: dict[tuple[str, str], _Kept] = {}

    @classmethod
    def from_settings(cls, settings: Settings, engine: Engine, actor: str) -> VaultAccess | None:
        """None with VAULT_MODE=off. Raises ConfigurationError for settings that are missing."""
        if settings.vault_mode == "off":
            return None
        settings.require("vault_url", "vault_admin_key", "vault_encryption_keys")
        hosted = settings.vault_mode == "hosted"
        wire = VaultWire.from_settings(settings)
        keys = RunKeys.from_settings(
            BillingRuns(engine, actor), settings, wire.issue if hosted else None
        )
        return cls(
            keys,
            settings.vault_url,
            auto_open_expected_cents=settings.run_auto_open_expected_cents,
            hosted=hosted,
        )

    def key_of(self, billing_run: str, currency: str) -> RunKey:
        """The key of a run, which is opened if that is allowed.

        Raises StripeUnavailable: `no_billing_run`, or whatever keeps a key from being had.
        """
        name = (billing_run, currency)
        kept = self._kept.get(name)
        if kept is not None and boot_clock_s() < kept.until_s:
            return kept.key
        key = self._find(*name)
        if len(self._kept) >= MAX_KEPT:
            self._kept.clear()
        self._kept[name] = _Kept(key, boot_clock_s() + self._kept_s)
        return key

    def ready(self, billing_run: str, currency: str) -> None:
        """See to it that a charge of this run can go out. Raises StripeUnavailable."""
        key = self.key_of(billing_run, currency)
        if self.hosted and key.state is RunState.CLOSING:
            raise StripeUnavailable("run_closing")

    def any_key(self) -> RunKey:
        """A key for reads and cancels, which need no budget. Raises StripeUnavailable."""
        for kept in list(self._kept.values()):
            return kept.key
        newest = self._keys.runs.newest()
        if newest is None:
            raise StripeUnavailable(NO_BILLING_RUN)
        return self.key_of(newest.billing_run, newest.currency)

    def renewed(self, refused: RunKey) -> RunKey | None:
        """The run's key by now; None when it is still the refused one."""
        name = (refused.run.billing_run, refused.run.currency)
        self._kept.pop(name, None)
        key = self.key_of(*name)
        return None if key.vault_key == refused.vault_key else key

    def _find(self, billing_run: str, currency: str) -> RunKey:
        try:
            found = self._keys.find(billing_run, currency, self._auto_open)
        except VaultUnavailable:
            raise StripeUnavailable("vault_unavailable") from None
        except StateForbids:
            raise StripeUnavailable("currency_not_capped") from None
        except ConfigurationError:
            raise StripeUnavailable("vault_key_unreadable") from None
        if found is None:
            raise StripeUnavailable(NO_BILLING_RUN)
        return found
