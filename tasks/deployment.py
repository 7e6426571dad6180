"""Namespace, Stripe mode and account, held against those that the database was started with.

Under another namespace every event looks new; in another account every look-up would "prove" that
nothing was charged.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from models import deployment
from models.errors import ChargebridgeError
from models.ledger import boot_clock_s
from tasks.errors import StripeUnavailable

if TYPE_CHECKING:
    from tasks.runtime import Runtime

ACCOUNT_CALL_S: Final = 5.0

logger = logging.getLogger(__name__)


def pin_deployment(here: Runtime) -> None:
    """For a worker's start. Raises ConfigurationError for what differs."""
    try:
        account_id = _account_id(here)
    except StripeUnavailable as error:
        # A start during an outage of Stripe's must not fail; the next start checks again.
        logger.warning("account_not_read", extra={"error_code": error.code})
        account_id = None
    _pin(here, account_id)


def check_names(here: Runtime) -> None:
    """Before a command writes: namespace and mode, for which nobody has to be asked.

    Raises ConfigurationError for what differs.
    """
    _pin(here, None)


def check_account(here: Runtime) -> None:
    """Before a command believes what Stripe shows. Raises ConfigurationError for what differs.

    Raises ChargebridgeError as well when Stripe does not say which account it is. Behind a vault
    that is the vault's to know, which checks it at its own start.
    """
    try:
        account_id = _account_id(here)
    except StripeUnavailable as error:
        if here.settings.vault_mode == "off":
            raise ChargebridgeError(
                f"Stripe could not be asked whose account this is ({error.code}); "
                "nothing was changed"
            ) from None
        account_id = None
    _pin(here, account_id)


def _account_id(here: Runtime) -> str | None:
    return here.gateway.account_id(boot_clock_s() + ACCOUNT_CALL_S)


def _pin(here: Runtime, account_id: str | None) -> None:
    settings = here.settings
    livemode = deployment.livemode_of(settings.stripe_api_key)
    deployment.pin_deployment(here.engine, settings.charge_namespace, livemode, account_id)
