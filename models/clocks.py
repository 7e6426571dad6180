"""Whether the database's clock can be believed: every window and every proof is counted on it.

A clock that runs a day ahead makes look-ups begin after the charge that they look for; put right
again, it makes what was sent days ago look as if it had been sent just now.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from sqlalchemy import text

from models.database import rows
from models.errors import ConfigurationError
from models.limits import MAX_CLOCK_OFF_S

if TYPE_CHECKING:
    from sqlalchemy import Engine

# Not `ledger_now()`: the sandbox moves that one on purpose.
_NOW: Final = text("SELECT EXTRACT(EPOCH FROM clock_timestamp())::double precision AS now_s")
# Two questions, since there are two partial indexes.
_FROM_THE_FUTURE: Final = text("""
    WITH limits AS MATERIALIZED (
        SELECT ledger_now() + make_interval(secs => :margin_s) AS latest)
    SELECT EXISTS (SELECT FROM billing_records, limits
                   WHERE state IN ('reserved', 'sent') AND updated_at > latest)
        OR EXISTS (SELECT FROM billing_records, limits
                   WHERE state IN ('processing', 'requires_action')
                       AND updated_at > latest) AS found""")


def clock_off_s(engine: Engine, host_clock: Callable[[], float] = time.time) -> float:
    """Seconds by which the database's clock is ahead of this host's. Raises LedgerUnavailable."""
    before_s = host_clock()
    now_s = float(rows(engine, _NOW, {})[0]["now_s"])
    return now_s - (before_s + host_clock()) / 2


def check_clock(engine: Engine, host_clock: Callable[[], float] = time.time) -> None:
    """Refuse a start while the clocks differ. Raises ConfigurationError, LedgerUnavailable."""
    off_s = clock_off_s(engine, host_clock)
    if abs(off_s) > MAX_CLOCK_OFF_S:
        way = "ahead of" if off_s > 0 else "behind"
        raise ConfigurationError(
            f"DATABASE_URL: the database's clock is {abs(off_s):.0f} s {way} this host's"
        )


def written_in_the_future(engine: Engine) -> bool:
    """Whether records without an end were written by a clock that was ahead and is so no more."""
    return bool(rows(engine, _FROM_THE_FUTURE, {"margin_s": MAX_CLOCK_OFF_S})[0]["found"])
