"""Namespace, Stripe's mode and account: a database that has seen one never goes on with another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sqlalchemy import text

from models.database import rows
from models.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import Engine, RowMapping

_BEGUN: Final = text("SELECT namespace FROM deployment")
_BEGIN: Final = text("""
    INSERT INTO deployment (namespace, livemode, account_id)
    VALUES (:namespace, CAST(:livemode AS boolean), CAST(:account_id AS text))
    ON CONFLICT ("only") DO UPDATE SET
        livemode = COALESCE(deployment.livemode, EXCLUDED.livemode),
        account_id = COALESCE(deployment.account_id, EXCLUDED.account_id)
    RETURNING namespace, livemode, account_id""")
_PIN: Final = text("""
    UPDATE deployment SET livemode = COALESCE(livemode, CAST(:livemode AS boolean)),
        account_id = COALESCE(account_id, CAST(:account_id AS text))
    RETURNING livemode, account_id""")
_NAMES: Final = {
    "namespace": "CHARGE_NAMESPACE",
    "livemode": "STRIPE_API_KEY (live or test mode)",
    "account_id": "STRIPE_API_KEY (account)",
}


def pin_deployment(
    engine: Engine,
    namespace: str,
    livemode: bool | None = None,
    account_id: str | None = None,
) -> None:
    """Pin namespace, Stripe mode and account, or check them against what is pinned.

    Raises ConfigurationError for one that differs: under another namespace or in another account
    every event would look as if it had never been charged.
    """
    given = {"namespace": namespace, "livemode": livemode, "account_id": account_id}
    _check(given, rows(engine, _BEGIN, given)[0])


def _check(given: Mapping[str, object], pinned: RowMapping) -> None:
    for column, value in given.items():
        if value is not None and pinned[column] != value:
            raise ConfigurationError(
                f"{_NAMES[column]} is not the one this database was started with"
            )


def livemode_of(api_key: str) -> bool | None:
    """Live or test mode by the key's own prefix; None for a key that does not say."""
    kind, _, rest = api_key.partition("_")
    mode = rest.partition("_")[0]
    if kind not in ("sk", "rk"):
        return None
    return {"live": True, "test": False}.get(mode)


def is_begun(engine: Engine) -> bool:
    """Whether a worker has started on this database, so that there is something to hold to."""
    return bool(rows(engine, _BEGUN, {}))


def pin_upstream(engine: Engine, api_key: str, account_id: str | None) -> None:
    """Pin mode and account of the account key, or check them against the pinned ones.

    For the vault: behind it the workers have no account key to tell them by. Pins nothing before
    the first worker has begun the deployment. Raises ConfigurationError for another one.
    """
    given = {"livemode": livemode_of(api_key), "account_id": account_id}
    for row in rows(engine, _PIN, given):
        _check(given, row)
