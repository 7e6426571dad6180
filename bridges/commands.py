"""`celery -A tasks bridge nsq|redis`. Everything heavy is imported inside the commands."""

from __future__ import annotations

import sys

import click


@click.group(name="bridge")
def bridge() -> None:
    """Take billing events from a broker and have each of them charged."""


@bridge.command()
@click.pass_context
def nsq(ctx: click.Context) -> None:
    """Take events from the NSQ topic NSQ_TOPIC, channel NSQ_CHANNEL."""
    _run(ctx, "nsq")


@bridge.command()
@click.pass_context
def redis(ctx: click.Context) -> None:
    """Take events from the stream REDIS_STREAM, group REDIS_GROUP, at REDIS_URL."""
    _run(ctx, "redis")


def _run(ctx: click.Context, kind: str) -> None:
    """Serve until SIGTERM or SIGINT; what prevents a start is one line and exit code 1."""
    if getattr(getattr(ctx.obj, "app", None), "main", None) != "chargebridge":
        raise click.UsageError("run it as `celery -A tasks bridge nsq` or `… redis`")
    # The plug-in is imported for every `celery` command, even for `celery --help`.
    from bridges.service import serve  # noqa: PLC0415
    from models.errors import ChargebridgeError  # noqa: PLC0415

    try:
        serve(kind)
    except ChargebridgeError as error:
        click.echo(f"chargebridge: {error}", err=True)
        sys.exit(1)
