"""`celery -A tasks run …`: what a billing run may spend, and how it stands."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from models.errors import EventRefused
from models.events import check_id
from models.money import DEFAULT_CURRENCY, MAX_TOTAL_CENTS
from tasks.commands.console import (
    Refused,
    json_option,
    ledger_engine,
    print_fields,
    print_json,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from models.billing_runs import BillingRuns, Run, RunReport
    from models.run_keys import RunKeys
    from models.settings import Settings

_name = click.argument("billing_run", metavar="RUN")
_currency = click.option("--currency", default=DEFAULT_CURRENCY, show_default=True)
_expected = click.option(
    "--expected-total-cents",
    type=click.IntRange(0, MAX_TOTAL_CENTS),
    required=True,
    help="In the currency's smallest unit; the cap is a tenth more.",
)


@click.group(name="run")
def run() -> None:
    """Billing runs: one budget for each (billing run, currency)."""


@run.command(name="open")
@_name
@_currency
@_expected
@json_option
@click.pass_context
def open_run(
    ctx: click.Context, billing_run: str, currency: str, expected_total_cents: int, as_json: bool
) -> None:
    """Open a run, with its cap and its vault key. Opening it again as it is does nothing."""
    with _runs(ctx) as (settings, runs):
        _check_name(billing_run)
        opened = runs.open(billing_run, currency, expected_total_cents)
        if settings.vault_mode != "off":
            _keys(settings, runs).of(opened)
        _print(runs.report(opened.billing_run, opened.currency), as_json=as_json)


def _check_name(billing_run: str) -> None:
    """Refuse what no event could ever name."""
    try:
        check_id("billing_run", billing_run)
    except EventRefused as refused:
        raise Refused(refused.detail) from None


@run.command()
@_name
@_currency
@json_option
@click.pass_context
def show(ctx: click.Context, billing_run: str, currency: str, as_json: bool) -> None:
    """Show what is expected, settled, held and free, and whether the cap will hold."""
    with _runs(ctx) as (_, runs):
        _print(runs.report(billing_run, currency), as_json=as_json)


@run.command(name="raise")
@_name
@_currency
@_expected
@click.option("--reason", required=True, help="Stands in the audit.")
@json_option
@click.pass_context
def raise_cap(
    ctx: click.Context,
    billing_run: str,
    currency: str,
    expected_total_cents: int,
    reason: str,
    as_json: bool,
) -> None:
    """Expect more of an open run, and so allow more. What was `blocked` needs a recharge."""
    with _runs(ctx) as (settings, runs):
        if settings.vault_mode == "hosted":
            raise Refused("a hosted vault keeps its own cap: raise it there")
        runs.raise_cap(billing_run, currency, expected_total_cents, reason)
        _print(runs.report(billing_run, currency), as_json=as_json)


@run.command()
@_name
@_currency
@json_option
@click.pass_context
def renew(ctx: click.Context, billing_run: str, currency: str, as_json: bool) -> None:
    """Give the run a new vault key for the same budget; the old one takes no new charges."""
    with _runs(ctx) as (settings, runs):
        _keys(settings, runs).renew(billing_run, currency)
        _print(runs.report(billing_run, currency), as_json=as_json)


@run.command()
@_name
@_currency
@json_option
@click.pass_context
def close(ctx: click.Context, billing_run: str, currency: str, as_json: bool) -> None:
    """Close a run with nothing unsettled, processing, in review or held; else it stays open."""
    with _runs(ctx) as (_, runs):
        runs.close(billing_run, currency)
        _print(runs.report(billing_run, currency), as_json=as_json)


@run.command()
@_name
@_currency
@click.option("--reason", required=True, help="Stands in the audit.")
@json_option
@click.pass_context
def reopen(ctx: click.Context, billing_run: str, currency: str, reason: str, as_json: bool) -> None:
    """Open a closed run again, with the cap it had. What was `blocked` needs a recharge."""
    with _runs(ctx) as (_, runs):
        runs.reopen(billing_run, currency, reason)
        _print(runs.report(billing_run, currency), as_json=as_json)


@contextmanager
def _runs(ctx: click.Context) -> Iterator[tuple[Settings, BillingRuns]]:
    from models.billing_runs import BillingRuns  # noqa: PLC0415 - heavy
    from tasks.operators import operator_of  # noqa: PLC0415 - heavy

    with ledger_engine(ctx) as (settings, engine):
        settings.require("vault_mode")
        yield settings, BillingRuns(engine, operator_of(settings))


def _keys(settings: Settings, runs: BillingRuns) -> RunKeys:
    """Keys as the mode has them: the self-hosted vault's are made in our own database."""
    from models.run_keys import RunKeys  # noqa: PLC0415 - heavy
    from models.vault_wire import VaultWire  # noqa: PLC0415 - heavy

    hosted = settings.vault_mode == "hosted"
    issue = VaultWire.from_settings(settings).issue if hosted else None
    return RunKeys.from_settings(runs, settings, issue)


def _print(report: RunReport, *, as_json: bool) -> None:
    fields = report_fields(report)
    if as_json:
        print_json(fields)
    else:
        print_fields(fields)


def report_fields(report: RunReport) -> dict[str, Any]:
    """A run as it is shown: counts of billing records, and amounts in the smallest unit."""
    opened: Run = report.run
    return {
        "billing_run": opened.billing_run,
        "currency": opened.currency,
        "state": opened.state,
        "expected_total_cents": opened.expected_total_cents,
        "cap_cents": opened.cap_cents,
        "settled_cents": opened.settled_cents,
        "held_cents": opened.held_cents,
        "free_cents": opened.free_cents,
        "open_holds": report.open_holds,
        "charged": report.charged.records,
        "charged_cents": report.charged.total_cents,
        "unsettled": report.unsettled.records,
        "unsettled_cents": report.unsettled.total_cents,
        "processing": report.processing.records,
        "in_review": report.in_review.records,
        "blocked": report.blocked.records,
        "blocked_cents": report.blocked.total_cents,
        "forecast_cents": report.forecast_cents,
        "cap_will_hold": report.cap_will_hold,
        "vault_key_expires_at": opened.vault_key_expires_at,
        "opened_at": opened.created_at,
        "closed_at": opened.closed_at,
    }
