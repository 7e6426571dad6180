"""Form parameters, read so that nobody can read them in another way."""

from __future__ import annotations

import re
from typing import Final, NoReturn
from urllib.parse import unquote_to_bytes

from vault.answers import Refused

MAX_PARAMETERS: Final = 80
_BAD_PERCENT: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")


def parse_form(text: str) -> dict[str, str]:
    """The parameters of a form, each once; raises Refused (`endpoint_refused`) otherwise."""
    given: dict[str, str] = {}
    if not text:
        return given
    parts = text.split("&")
    if len(parts) > MAX_PARAMETERS:
        _refuse(f"there are at most {MAX_PARAMETERS} parameters")
    for part in parts:
        raw_name, mark, raw_value = part.partition("=")
        if not mark:
            _refuse("a parameter must have a name and a value")
        name, value = _decoded(raw_name), _decoded(raw_value)
        if name in given:
            _refuse("a parameter may be given only once", name[:80])
        given[name] = value
    return given


def _decoded(text: str) -> str:
    if _BAD_PERCENT.search(text) is not None:
        _refuse("a percent sign must stand before two hex digits")
    try:
        decoded = unquote_to_bytes(text.replace("+", " ")).decode("utf-8")
    except UnicodeDecodeError:
        _refuse("a parameter must be UTF-8")
    if "\x00" in decoded:
        _refuse("a parameter must not contain NUL")
    return decoded


def _refuse(message: str, param: str | None = None) -> NoReturn:
    raise Refused("endpoint_refused", message, param)
