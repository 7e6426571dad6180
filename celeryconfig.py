"""Celery's settings. Celery imports this module when it first needs them, never before.

The queue is a hint and the ledger the truth: a message that is lost is published again by the
bridge or by the sweep, one that is delivered twice finds the first one's lease or outcome.
"""

from __future__ import annotations

import os
from datetime import datetime, timedelta
from typing import Any

from celery.schedules import schedstate, schedule
from kombu import Connection, Exchange, Queue

from models.errors import ConfigurationError
from models.limits import MAX_CLOCK_OFF_S
from models.settings import Settings, load_settings

CHARGES = "charges"
CONTROL = "control"
BROKER_ANSWER_S = 2
"""A broker that is frozen or gone is noticed after this, by publishers and workers alike."""
MAX_ETA_TASKS = 100
SWEEP_EXPIRES_S = 2 * MAX_CLOCK_OFF_S
"""Sweeps that nobody took in time are dropped: the next one does the same work. Beat's host and the
worker's compare their clocks in it, so it is well above what two clocks may differ by."""


class SteadySchedule(schedule):
    """Every so many seconds, whatever the clock did.

    Beat keeps in a file when it last did what. A time there that lies in the future, from a clock
    that was ahead, would keep it silent until then, over every restart.
    """

    def is_due(self, last_run_at: datetime) -> tuple[bool, float]:
        """(whether to run now, seconds until the next look)."""
        if self.maybe_make_aware(last_run_at) > self.maybe_make_aware(self.now()):
            return schedstate(is_due=True, next=self.seconds)
        due: tuple[bool, float] = super().is_due(last_run_at)
        return due


def _load() -> Settings:
    try:
        settings = load_settings()
        settings.require("celery_broker_url")
        _check_broker(settings.celery_broker_url)
        _be_heard(settings.celery_broker_url)
    except ConfigurationError as error:
        # Celery would print a traceback of its own loading.
        raise SystemExit(f"chargebridge: {error}") from None
    return settings


def _check_broker(url: str) -> None:
    """Have Celery's own library read it, all alternatives of it. Connects to nothing.

    Raises ConfigurationError.
    """
    try:
        # With `ssl` given, the library has nothing to warn about: only its reading matters here.
        connection = Connection(url, ssl=True)
        for alternative in connection.alt:
            connection.switch(alternative)
            connection.get_transport_cls()
    except Exception:  # each kind of broker has errors of its own, with the password in some
        raise ConfigurationError("CELERY_BROKER_URL: Celery cannot use this URL") from None


def _be_heard(broker_url: str) -> None:
    """Celery reads some variables by itself and prefers them to this module, unchecked."""
    os.environ["CELERY_BROKER_URL"] = broker_url
    for name in ("CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL", "CELERY_RESULT_BACKEND"):
        os.environ.pop(name, None)


_settings = _load()
_limits = _settings.limits

# -- broker ------------------------------------------------------------------------------------
broker_url = _settings.celery_broker_url
broker_connection_timeout = BROKER_ANSWER_S
broker_connection_retry_on_startup = True
broker_connection_max_retries = None
broker_transport_options: dict[str, Any] = {
    "visibility_timeout": _limits.visibility_timeout_s,
    # Without these a frozen Redis holds a publisher for ever.
    "socket_timeout": BROKER_ANSWER_S,
    "socket_connect_timeout": BROKER_ANSWER_S,
    # With the defaults a killed worker's messages come back up to 67 s later than they could.
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
}
# Whether a failed publish arrived is unknown, and a repeat of it may arrive twice: the bridge
# and the sweep decide when to publish again, from the ledger.
task_publish_retry_policy = {
    "max_retries": 0,
    "interval_start": 0,
    "interval_step": 0,
    "interval_max": 0,
}

# -- messages ----------------------------------------------------------------------------------
task_serializer = "json"
result_serializer = "json"
event_serializer = "json"
accept_content = ["json"]
timezone = "UTC"
enable_utc = True

# -- queues ------------------------------------------------------------------------------------
# Each has its own exchange: by default both would be bound to that of the default queue.
task_queues = [Queue(name, Exchange(name), routing_key=name) for name in (CHARGES, CONTROL)]
task_default_queue = CHARGES
task_create_missing_queues = False
# Sweeps and recharges never wait behind charges.
task_routes = {
    "tasks.charge": {"queue": CHARGES},
    "tasks.*": {"queue": CONTROL},
}

# -- results: there are none; the ledger has them ----------------------------------------------
result_backend = None
task_ignore_result = True
task_store_errors_even_if_ignored = False

# -- delivery ----------------------------------------------------------------------------------
task_acks_late = True
# A killed child's message comes back at once, to whoever is free.
task_reject_on_worker_lost = True
# A failed or timed-out task has left its record as it is: the sweep takes it up again, with a
# pause that the ledger decides. Handing the message back would repeat it without any pause.
task_acks_on_failure = True
task_acks_on_timeout = True
worker_prefetch_multiplier = 1
worker_eta_task_limit = MAX_ETA_TASKS
task_soft_time_limit = _limits.soft_limit_s
task_time_limit = _limits.hard_limit_s
# A lost broker connection brings the message round again while the first run still goes on.
# The second run finds the first one's lease and leaves; killing the first one instead would
# turn an answer that is on its way into an unknown.
worker_cancel_long_running_tasks_on_connection_loss = False
worker_consumer = "tasks.lost_broker:LastingConsumer"

# -- what is seen ------------------------------------------------------------------------------
worker_send_task_events = True
task_send_sent_event = True
worker_enable_remote_control = True
worker_hijack_root_logger = False
worker_redirect_stdouts = False

# -- beat --------------------------------------------------------------------------------------
beat_schedule = {
    "sweep": {
        "task": "tasks.sweep",
        "schedule": SteadySchedule(timedelta(seconds=_limits.sweep_interval_s)),
        "options": {
            "queue": CONTROL,
            "expires": max(SWEEP_EXPIRES_S, 2 * _limits.sweep_interval_s),
        },
    },
}
beat_max_loop_interval = _limits.sweep_interval_s
