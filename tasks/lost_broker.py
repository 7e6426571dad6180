"""A worker whose broker goes away lives on, whatever the library stumbles over meanwhile.

Closing a lost connection can end in an error that is no connection error: a channel that is
half closed asks for the client that its transport has forgotten already. Celery takes that for a
bug and ends the worker. Named by `worker_consumer` in celeryconfig; loaded by workers only.
"""

from __future__ import annotations

import logging

from celery.worker.consumer import Consumer

logger = logging.getLogger(__name__)


class LastingConsumer(Consumer):
    """Reconnects even if the lost connection cannot be closed in order."""

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Let go of the connection; the caller connects anew."""
        try:
            super().on_connection_error_after_connected(exc)
        except Exception:
            logger.warning("lost_connection_not_closed", exc_info=True)
            self.connection = None
