"""Whether the vault's account key is of the account that the database was started with."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from models.deployment import is_begun, pin_upstream
from models.errors import ConfigurationError, LedgerUnavailable
from models.replies import text_of
from vault.rules import ForwardCall
from vault.upstream import Broken, NotConnected, Upstream

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from models.settings import Settings

ACCOUNT_CALL_S: Final = 5.0
ASK_EVERY_S: Final = 2.0
"""While Stripe has not said; short, since from its first answer on charges go through as well."""
OK: Final = 200
NOT_FOR_THIS_KEY: Final = (401, 403, 404)
"""A key that may not read its account: an answer, and there will be no other."""

READ_ACCOUNT: Final = ForwardCall(
    rule="GET /v1/account",
    method="GET",
    target="/v1/account",
    body=None,
    idempotency_key=None,
    stripe_version=None,
    endpoint="account",
    money=None,
)

logger = logging.getLogger(__name__)


class NotSaid(Exception):  # noqa: N818 - says what happened
    """Stripe did not answer, or not in a way that tells whose key it is."""


class AccountCheck:
    """Asks Stripe whose key it is until it is known, and holds that against the pinned account.

    An outage of Stripe's keeps no vault from its start: it is asked again while the vault serves.
    Nothing is asked before the first worker has begun the deployment.
    """

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self._settings = settings
        self._engine = engine
        self.is_known = False

    def run_once(self) -> None:
        """Ask, unless it is known already.

        Raises ConfigurationError for a key of another account or mode; LedgerUnavailable.
        """
        if self.is_known or not is_begun(self._engine):
            return
        account_id, is_said = None, True
        try:
            account_id = self._read()
        except NotSaid as error:
            is_said = False
            logger.warning("account_not_read", extra={"error": str(error)})
        pin_upstream(self._engine, self._settings.stripe_api_key, account_id)
        self.is_known = is_said

    async def run(self, stop: asyncio.Event) -> None:
        """Ask until it is known or `stop` is set, which another account sets too.

        Raises ConfigurationError for another account.
        """
        while not (self.is_known or stop.is_set()):
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), ASK_EVERY_S)
                return
            try:
                await asyncio.to_thread(self.run_once)
            except LedgerUnavailable:
                logger.warning("account_not_checked", extra={"error": "ledger_unavailable"})
            except ConfigurationError as error:
                logger.critical("another_account", extra={"error": str(error)})
                stop.set()
                raise

    def _read(self) -> str | None:
        """The account's id; None where the key may not read it. Raises NotSaid."""
        settings = self._settings
        upstream = Upstream(settings.stripe_api_base, settings.stripe_api_key, ACCOUNT_CALL_S)
        try:
            reply = upstream.exchange(READ_ACCOUNT, before_write=lambda: None)
            if reply.status in NOT_FOR_THIS_KEY:
                return None
            found = json.loads(reply.body) if reply.status == OK else None
        except (NotConnected, Broken, ValueError) as error:
            raise NotSaid(type(error).__name__) from None
        finally:
            upstream.close()
        account_id = text_of(found) if isinstance(found, dict) else None
        if account_id is None:
            raise NotSaid(f"http_{reply.status}")
        return account_id
