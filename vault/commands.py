"""`celery -A tasks vault serve|keys|holds`. Everything heavy is imported inside the commands."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

import click

from vault.console import (
    Failed,
    after_option,
    database,
    json_option,
    limit_option,
    one_line_errors,
    print_done,
    print_rows,
)

_KEY_COLUMNS: Final = (
    "id",
    "billing_run",
    "currency",
    "label",
    "created_at",
    "expires_at",
    "revoked_at",
)
_HOLD_COLUMNS: Final = (
    "id",
    "billing_run",
    "currency",
    "idempotency_key",
    "amount_cents",
    "state",
    "outcome",
    "last_sent_at",
    "forwards",
)
_STATES: Final = ("reserved", "sent", "settled", "released", "unknown")


@click.group(name="vault")
def vault() -> None:
    """The spend-cap proxy in front of Stripe, its keys and its holds."""


@vault.command()
def serve() -> None:
    """Serve on VAULT_LISTEN until SIGTERM or SIGINT."""
    from vault.service import serve as run  # noqa: PLC0415 - heavy

    with one_line_errors():
        run()


@vault.group(name="keys")
def keys() -> None:
    """Keys that the vault has issued. `celery -A tasks run open` makes a run's own."""


@keys.command(name="list")
@click.option("--run", "billing_run", help="Of this billing run only.")
@after_option
@limit_option
@json_option
def list_keys(billing_run: str | None, after_id: int, limit: int, as_json: bool) -> None:
    """Keys by id, without the keys themselves, which nobody has."""
    from models.vault_keys import VaultKeys  # noqa: PLC0415 - heavy

    with database() as engine:
        found = VaultKeys(engine).list(limit=limit, after_id=after_id, billing_run=billing_run)
        print_rows([asdict(key) for key in found], _KEY_COLUMNS, as_json=as_json)


@keys.command()
@click.argument("key_id", type=click.IntRange(min=1))
@json_option
def revoke(key_id: int, as_json: bool) -> None:
    """Let a key take no new holds. What it has under way ends as it would have.

    New charges under it are `blocked`. To replace a run's key use `celery -A tasks run renew`,
    which blocks nothing.
    """
    from models.vault_keys import VaultKeys  # noqa: PLC0415 - heavy

    with database() as engine:
        if VaultKeys(engine).revoke(key_id) is None:
            raise Failed(f"there is no key {key_id}")
    print_done({"id": key_id, "revoked": True}, f"revoked key {key_id}", as_json=as_json)


@keys.command()
@json_option
def reencrypt(as_json: bool) -> None:
    """Encrypt all stored keys with the first of VAULT_ENCRYPTION_KEYS, to let go of old ones."""
    from models.billing_runs import BillingRuns  # noqa: PLC0415 - heavy
    from models.run_keys import RunKeys  # noqa: PLC0415 - heavy
    from models.settings import load_settings  # noqa: PLC0415 - heavy

    with database() as engine:
        count = RunKeys.from_settings(BillingRuns(engine, "vault"), load_settings()).reencrypt()
    print_done({"reencrypted": count}, f"encrypted {count} keys anew", as_json=as_json)


@vault.group(name="holds")
def holds() -> None:
    """Money that is set aside, spent or given back, by idempotency key."""


@holds.command(name="list")
@click.option("--run", "billing_run", help="Of this billing run only.")
@click.option("--state", type=click.Choice(_STATES), help="In this state only.")
@after_option
@limit_option
@json_option
def list_holds(
    billing_run: str | None, state: str | None, after_id: int, limit: int, as_json: bool
) -> None:
    """Holds by id."""
    from models.limits import Limits  # noqa: PLC0415 - heavy
    from vault.holds import Holds  # noqa: PLC0415 - heavy
    from vault.verdicts import HoldState  # noqa: PLC0415 - heavy

    with database() as engine:
        found = Holds(engine, Limits(), "").list(
            limit=limit,
            after_id=after_id,
            billing_run=billing_run,
            state=HoldState(state) if state else None,
        )
        print_rows(found, _HOLD_COLUMNS, as_json=as_json)


@holds.command(name="resolve")
@click.argument("idempotency_key")
@click.argument("outcome", type=click.Choice(("settled", "failed", "absent")))
@json_option
def resolve_hold(idempotency_key: str, outcome: str, as_json: bool) -> None:
    """Say what became of a hold, after asking Stripe.

    settled: the money was taken. failed: it was not, and cannot be any more. absent: Stripe has
    never executed this key. The last two are refused while a forward is open.
    """
    from models.limits import Limits  # noqa: PLC0415 - heavy
    from vault.holds import Holds  # noqa: PLC0415 - heavy
    from vault.verdicts import Verdict  # noqa: PLC0415 - heavy

    with database() as engine:
        moved = Holds(engine, Limits(), "").resolve(
            idempotency_key,
            Verdict.SETTLED if outcome == "settled" else Verdict.FAILED,
            absent=outcome == "absent",
        )
    done = {"id": moved.hold_id, "before": moved.before, "state": moved.next}
    print_done(done, f"{moved.before} -> {moved.next}", as_json=as_json)
