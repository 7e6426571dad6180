"""Live or test mode: a database that has seen one must never go on with the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sqlalchemy import text

from models.database import rows
from models.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlalchemy import Engine

_PIN_MODE: Final = text("""
    UPDATE deployment SET livemode = COALESCE(livemode, CAST(:livemode AS boolean))
    RETURNING livemode""")


def livemode_of(api_key: str) -> bool | None:
    """Live or test mode by the key's own prefix; None for a key that does not say."""
    kind, _, rest = api_key.partition("_")
    mode = rest.partition("_")[0]
    if kind not in ("sk", "rk"):
        return None
    return {"live": True, "test": False}.get(mode)


def pin_mode(engine: Engine, api_key: str) -> None:
    """Pin the mode of the account key, or check it against the pinned one; for the vault.

    Behind a vault the workers have no account key to tell it by. Nothing is pinned before the
    first worker has begun the deployment. Raises ConfigurationError for another mode.
    """
    livemode = livemode_of(api_key)
    for row in rows(engine, _PIN_MODE, {"livemode": livemode}):
        if livemode is not None and row["livemode"] != livemode:
            raise ConfigurationError(
                "STRIPE_API_KEY (live or test mode) is not the one this database was started with"
            )
