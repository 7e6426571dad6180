"""Stripe's mode and account: a database that has seen one must never go on with another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sqlalchemy import text

from models.database import rows
from models.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Engine

_BEGUN: Final = text("SELECT namespace FROM deployment")

_PIN: Final = text("""
    UPDATE deployment SET livemode = COALESCE(livemode, CAST(:livemode AS boolean)),
        account_id = COALESCE(account_id, CAST(:account_id AS text))
    RETURNING livemode, account_id""")


def livemode_of(api_key: str) -> bool | None:
    """Live or test mode by the key's own prefix; None for a key that does not say."""
    kind, _, rest = api_key.partition("_")
    mode = rest.partition("_")[0]
    if kind not in ("sk", "rk"):
        return None
    return {"live": True, "test": False}.get(mode)


def pin_upstream(engine: Engine, api_key: str, read_account: Callable[[], str | None]) -> None:
    """Pin mode and account of the account key, or check them against the pinned ones.

    For the vault: behind it the workers have no account key to tell them by. `read_account` asks
    Stripe; None where it does not say. Nothing is asked or pinned before the first worker has
    begun the deployment. Raises ConfigurationError for another one.
    """
    if not rows(engine, _BEGUN, {}):
        return
    given = {"livemode": livemode_of(api_key), "account_id": read_account()}
    names = {"livemode": "live or test mode", "account_id": "account"}
    for row in rows(engine, _PIN, given):
        for column, value in given.items():
            if value is not None and row[column] != value:
                raise ConfigurationError(
                    f"STRIPE_API_KEY ({names[column]}) is not the one this database was started "
                    "with"
                )
