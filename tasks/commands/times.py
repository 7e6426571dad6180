"""Moments as operators write them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

import click

EARLIEST: Final = datetime(2000, 1, 1, tzinfo=UTC)
"""Of anything that Stripe could be asked for."""


class Moment(click.ParamType[datetime]):
    """A time in ISO 8601, UTC where no zone is given, not in the future."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime:
        """The moment; a usage error for anything else."""
        if isinstance(value, datetime):
            return value
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            self.fail("a time in ISO 8601 is needed, as 2026-11-30T11:00:00Z", param, ctx)
        moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        if moment > datetime.now(UTC):
            self.fail("the time lies in the future", param, ctx)
        if moment < EARLIEST:
            self.fail(f"the time lies before {EARLIEST:%Y}", param, ctx)
        return moment


def moment_option(name: str, *, help: str, required: bool = False) -> Callable[..., Any]:  # noqa: A002
    """An option that takes a moment."""
    return click.option(name, type=Moment(), metavar="TIME", help=help, required=required)
