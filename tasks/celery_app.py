"""The Celery app. Making it reads no settings and connects to nothing."""

from __future__ import annotations

from celery import Celery

from tasks import worker_start

app = Celery(
    "chargebridge", include=["tasks.charge", "tasks.recharge", "tasks.reconcile", "tasks.sweep"]
)
app.config_from_object("celeryconfig")
worker_start.connect()
