"""Texts from outside: the environment and the command line may hold bytes that are no text."""

from __future__ import annotations


def is_utf8(text: str) -> bool:
    """Whether it came from UTF-8. Anything else can go into no database, request or log."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
