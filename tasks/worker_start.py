"""What a worker or beat checks and sets up before it takes any work.

Whatever is wrong here is one clear line and exit code 1: a process that cannot keep its
promises must not start.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import click
from celery import signals

from models import faults
from models.errors import ChargebridgeError, ConfigurationError
from models.logs import configure_logging

logger = logging.getLogger(__name__)
_role = "celery"


def connect() -> None:
    """Hook into Celery's start. Connects to nothing else."""
    signals.setup_logging.connect(_setup_logging)
    # The first signal of a worker's start, before anything is printed.
    signals.celeryd_init.connect(_worker_init)
    signals.worker_process_init.connect(_worker_process_init)
    signals.beat_init.connect(_beat_init)
    signals.import_modules.connect(_check_flower)


def _setup_logging(loglevel: Any = None, logfile: str | None = None, **_: Any) -> None:
    level = loglevel if isinstance(loglevel, int) else logging.INFO
    configure_logging(_role, level, logfile)


def _worker_init(sender: Any, instance: Any, **_: Any) -> None:
    global _role  # noqa: PLW0603 - the process has one role, known once it starts
    _role = str(sender).partition("@")[0]
    # Until Celery sets its own up: what the checks have to say comes before that.
    configure_logging(_role, logging.WARNING)
    with _or_exit():
        check_worker(instance.app)


def _beat_init(sender: Any, **_: Any) -> None:
    with _or_exit():
        check_broker(sender.app)


def _worker_process_init(**_: Any) -> None:
    from tasks.runtime import forget_parent  # noqa: PLC0415 - see check_worker

    with _or_exit():
        forget_parent()


def _check_flower(**_: Any) -> None:
    """Flower looks for its settings in the folder it is started in; without them it is open."""
    context = click.get_current_context(silent=True)
    if context is None or context.info_name != "flower":
        return
    with _or_exit():
        from tasks.flower_fences import installed  # noqa: PLC0415 - Flower is large

        if not installed():
            raise ConfigurationError("flowerconfig.py is not here; start Flower where it is")


@contextmanager
def _or_exit() -> Iterator[None]:
    """Let no failure of a check pass: Celery would log it and start the process all the same."""
    try:
        yield
    except ChargebridgeError as error:
        _exit(str(error))
    except Exception as error:
        # The type only: a library's message may hold a URL with its password.
        _exit(f"the checks before the start failed ({type(error).__name__})")


def _exit(line: str) -> NoReturn:
    print(f"chargebridge: {line}", file=sys.stderr, flush=True)  # noqa: T201 - the one line
    raise SystemExit(1)


def check_worker(app: Any) -> None:
    """All that a worker insists on. Raises ConfigurationError or LedgerUnavailable."""
    from models.clocks import check_clock  # noqa: PLC0415 - beat and commands need none of it
    from models.database import check_database  # noqa: PLC0415
    from tasks.deployment import pin_deployment  # noqa: PLC0415
    from tasks.runtime import build_runtime  # noqa: PLC0415
    from tasks.unrevokable import refuse_revocation  # noqa: PLC0415

    runtime = build_runtime()
    try:
        check_broker(app)
        check_database(runtime.engine)
        check_clock(runtime.engine)
        if runtime.reads.recovering():
            raise ConfigurationError(
                "DATABASE_URL: a recovery is not finished; run `ledger recover` to its end"
            )
        pin_deployment(runtime)
    finally:
        # Nothing of this may live on into a fork.
        runtime.close()
    faults.enable(runtime.settings.faults_dir or None)
    refuse_revocation()
    for warning in runtime.settings.warnings:
        logger.warning("limits_warning", extra={"why": warning})


def check_broker(app: Any) -> None:
    """Refuse a broker that does not answer. Raises ConfigurationError."""
    try:
        with app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=5)
            connection.default_channel.client.ping()
    except Exception as error:
        raise ConfigurationError(
            f"CELERY_BROKER_URL: the broker does not answer ({type(error).__name__})"
        ) from None
