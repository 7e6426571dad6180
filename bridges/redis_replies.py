"""What Redis answers about streams, read into values. Bytes stay bytes."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from models.errors import DeadLetterReason, EventRefused

CURSOR_END: Final = b"0-0"


@dataclass(frozen=True, slots=True)
class Entry:
    """A stream entry: its names and values in turn, or None when it was trimmed."""

    entry_id: str
    fields: Sequence[bytes] | None


@dataclass(frozen=True, slots=True)
class Claimed:
    """One page of XAUTOCLAIM … JUSTID."""

    cursor: bytes
    """Where the next page begins; CURSOR_END after the last one."""
    ids: Sequence[bytes]
    dropped: Sequence[bytes]
    """Entries that no longer exist and that Redis has taken out of the pending list itself."""


def read_claimed(reply: Sequence[Any]) -> Claimed:
    """XAUTOCLAIM answers in two parts up to 6.2 and in three from 7.0 on; either may hold nils."""
    dropped = reply[2] if len(reply) > 2 and reply[2] else ()
    return Claimed(
        cursor=reply[0],
        ids=[_id(item) for item in reply[1] or () if item is not None and _id(item)],
        dropped=[item for item in dropped if item],
    )


def _id(item: Any) -> bytes:
    # A server that does not know JUSTID for this command answers with whole entries.
    return item[0] if isinstance(item, list | tuple) else item


def read_group_reply(reply: Any) -> list[Entry]:
    """XREADGROUP of one stream; nil when nothing came in time."""
    return [_entry(item) for _stream, items in reply or () for item in items or ()]


def read_range(entry_id: bytes, reply: Sequence[Any] | None) -> Entry:
    """XRANGE of exactly one id; empty when the entry was trimmed."""
    for item in reply or ():
        if item is not None:
            return _entry(item)
    return Entry(entry_id.decode("ascii"), None)


def _entry(item: Any) -> Entry:
    entry_id, fields = item
    return Entry(entry_id.decode("ascii"), fields)


def payload_of(entry: Entry, payload_field: bytes) -> bytes:
    """The body of a billing event; raises EventRefused where there is none."""
    if entry.fields is None:
        raise EventRefused(DeadLetterReason.PAYLOAD_LOST, "the entry was trimmed unread")
    names = entry.fields[::2]
    if names.count(payload_field) != 1:
        count = "no" if payload_field not in names else "more than one"
        raise EventRefused(
            DeadLetterReason.INVALID_EVENT, f"the entry has {count} field for the payload"
        )
    return entry.fields[2 * names.index(payload_field) + 1]


def whole_entry(entry: Entry) -> bytes:
    """All of an entry that has no payload, to be kept: pairs in their order, as JSON."""
    if entry.fields is None:
        return b""
    pairs = list(zip(entry.fields[::2], entry.fields[1::2], strict=True))
    return json.dumps([[_text(name), _text(value)] for name, value in pairs]).encode()


def _text(value: bytes) -> object:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode("ascii")}
