"""Files of one JSON object a line, read strictly and one line at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from models.errors import ChargebridgeError, EventRefused
from models.strict_json import MAX_BODY_BYTES, parse_strict_json

T = TypeVar("T")


class BadLine(ChargebridgeError):  # noqa: N818 - says what it is
    """A line that cannot be used: `FILE:LINE: why`, without the line's own values."""

    def __init__(self, path: str, line: int, why: str) -> None:
        super().__init__(path, line, why)
        self.path, self.line, self.why = path, line, why

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.why}"


def read_lines(path: Path, read: Callable[[dict[str, Any]], T]) -> Iterator[tuple[int, T]]:
    """Line numbers (from 1) and what `read` makes of each line's object; blank lines are left out.

    `read` raises EventRefused for an object that it cannot use. Raises as `read_raw_lines`.
    """
    for number, _, value in read_raw_lines(path):
        try:
            yield number, read(value)
        except EventRefused as refused:
            raise BadLine(str(path), number, refused.detail) from None


def read_raw_lines(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """(line number, the line's own bytes without its end, its object); blank lines are left out.

    Nothing but the line at hand is kept. Raises BadLine for the first line that is not one
    strict JSON object, and ChargebridgeError for a file that cannot be read.
    """
    number = 0
    try:
        with path.open("rb") as file:
            # A file without line ends must not be read into memory whole.
            while raw := file.readline(MAX_BODY_BYTES + 2):
                number += 1
                if raw.strip():
                    body = raw.rstrip(b"\r\n")
                    yield number, body, _object(body)
    except EventRefused as refused:
        raise BadLine(str(path), number, refused.detail) from None
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise ChargebridgeError(f"{path}: {why}") from None


def _object(body: bytes) -> dict[str, Any]:
    value = parse_strict_json(body)
    if not isinstance(value, dict):
        raise EventRefused("invalid_event", "a line is one JSON object")
    return value
