"""JSON from outside, read strictly: what two readers could understand differently is refused."""

from __future__ import annotations

import json
import re
from typing import Final, NoReturn

from models.errors import DeadLetterReason, EventRefused

MAX_BODY_BYTES: Final = 256 * 1024
MAX_DEPTH_LEVELS: Final = 64
"""Objects and arrays inside each other, the outermost counted as one."""

NOT_AN_INTEGER: Final = object()
"""Stands for a number that no field takes: refused where it counts, ignored elsewhere."""

_MAX_INTEGER_CHARACTERS: Final = 20
# An open string runs to the end: with a closing quote required, a body of escaped quotes would
# be scanned again from each of them.
_JSON_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))


def parse_strict_json(body: bytes) -> object:
    """Return the JSON value in a body; raise EventRefused (`too_large` or `invalid_json`).

    Strict UTF-8 without byte-order mark, at most MAX_BODY_BYTES long and MAX_DEPTH_LEVELS deep,
    no NaN, no Infinity, no object that has a name twice. A number that is not an integer, or has
    more digits than any integer of ours, becomes NOT_AN_INTEGER. The time is linear in the length.
    """
    if len(body) > MAX_BODY_BYTES:
        raise EventRefused(
            DeadLetterReason.TOO_LARGE, f"the body is longer than {MAX_BODY_BYTES} bytes"
        )
    detail = "the body is not JSON"
    try:
        text = body.decode("utf-8")
        _check_depth(body)
        parsed: object = _DECODER.decode(text)
    except UnicodeDecodeError:
        detail = "the body is not UTF-8"
    except json.JSONDecodeError as error:
        detail = f"the body is not JSON (at character {error.pos})"
    else:
        return parsed
    # Raised out here, so that no exception that holds the body hangs on it as its context.
    raise EventRefused(DeadLetterReason.INVALID_JSON, detail)


def _check_depth(body: bytes) -> None:
    """Refuse a body that the parser, which calls itself once a level, should not see."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH_LEVELS:
        return
    levels = 0
    for bracket in _JSON_STRING.sub(b"", body).translate(None, _NOT_BRACKETS):
        levels += 1 if bracket in b"[{" else -1
        if levels > MAX_DEPTH_LEVELS:
            raise EventRefused(
                DeadLetterReason.INVALID_JSON, f"the body is deeper than {MAX_DEPTH_LEVELS} levels"
            )


def _unique_names(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise EventRefused(DeadLetterReason.INVALID_JSON, "an object has the same name twice")
    return names


def _refuse_constant(_literal: str) -> NoReturn:
    raise EventRefused(DeadLetterReason.INVALID_JSON, "NaN and Infinity are not JSON")


def _integer(literal: str) -> object:
    # Digits without end are slow to convert, and over a few thousand Python refuses to.
    return int(literal) if len(literal) <= _MAX_INTEGER_CHARACTERS else NOT_AN_INTEGER


def _float(_literal: str) -> object:
    return NOT_AN_INTEGER


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_unique_names,
    parse_constant=_refuse_constant,
    parse_float=_float,
    parse_int=_integer,
)
