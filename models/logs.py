"""One way to log, for every process: one line a record, static event names, ids as fields.

Our own records carry what they are about in `extra`. What other libraries log is cut to its
first line and its exception to type and place: their messages may quote a task's arguments, a
broker message or a reply, and none of those belongs into a log.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from logging.handlers import WatchedFileHandler
from typing import Final

from models.errors import ChargebridgeError

OWN_LOGGERS: Final = ("tasks", "bridges", "vault", "models")
"""Roots of the loggers whose `extra` fields are printed."""
QUIET_LOGGERS: Final = ("stripe", "urllib3", "kombu", "alembic", "sqlalchemy")
"""Libraries that would log requests, replies or statements at INFO."""
MAX_VALUE_CHARACTERS: Final = 300
MAX_MESSAGE_CHARACTERS: Final = 500
MAX_FRAMES: Final = 4

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class LineFormatter(logging.Formatter):
    """`time level role logger event key=value …`, always one line."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self.role = role

    def format(self, record: logging.LogRecord) -> str:
        """One line for a record; the fields of our own loggers in the order of their names."""
        own = record.name.partition(".")[0] in OWN_LOGGERS
        parts = [self._time(record), record.levelname, self.role, record.name, _message(record)]
        if own:
            parts += [f"{name}={_value(value)}" for name, value in _fields(record)]
        if record.exc_info and record.exc_info[1] is not None:
            parts.append(f"exception={_value(describe_exception(record.exc_info[1]))}")
        return " ".join(parts)

    @staticmethod
    def _time(record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return f"{seconds}.{int(record.msecs):03d}Z"


def describe_exception(error: BaseException) -> str:
    """Type and place of an exception; its text only where it is one of ours, which is safe."""
    text = f": {error}" if isinstance(error, ChargebridgeError) else ""
    frames = traceback.extract_tb(error.__traceback__)[-MAX_FRAMES:]
    places = " < ".join(
        f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in reversed(frames)
    )
    return f"{type(error).__name__}{text}" + (f" at {places}" if places else "")


def _message(record: logging.LogRecord) -> str:
    # The rest of a foreign message can be the whole body of what could not be read.
    lines = record.getMessage().strip().splitlines()
    return _printable(lines[0] if lines else "")[:MAX_MESSAGE_CHARACTERS]


def _fields(record: logging.LogRecord) -> list[tuple[str, object]]:
    return sorted(
        (name, value)
        for name, value in vars(record).items()
        if name not in _STANDARD and isinstance(value, str | int | float | None)
    )


def _value(value: object) -> str:
    text = _printable(str(value))[:MAX_VALUE_CHARACTERS]
    return f'"{text}"' if not text or " " in text or "=" in text else text


def _printable(text: str) -> str:
    return "".join(sign if sign.isprintable() else "?" for sign in text).replace('"', "'")


def configure_logging(role: str, level: int = logging.INFO, path: str | None = None) -> None:
    """Send every record of this process to stderr (or a file) in our one format.

    May be called again. The file is opened anew when somebody rotates it away.
    """
    handler = WatchedFileHandler(path) if path else logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(role))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
