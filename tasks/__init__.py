"""Celery tasks: the charge, and the sweep. `celery -A tasks` finds the app here."""

from tasks.celery_app import app

__all__ = ["app"]
