"""Names at brokers, checked before a library swallows a wrong one."""

from __future__ import annotations

import re
from typing import Final

from models.errors import ConfigurationError

_NSQ_NAME: Final = re.compile(r"[.a-zA-Z0-9_-]{1,64}")
_REDIS_NAME: Final = re.compile(r"[^\s\x00-\x1f\x7f]{1,255}")


def check_nsq_names(topic: str, channel: str) -> None:
    """Refuse names that nsqd would not take, and channels that lose messages."""
    for setting, name in (("NSQ_TOPIC", topic), ("NSQ_CHANNEL", channel)):
        if name.endswith("#ephemeral"):
            raise ConfigurationError(f"{setting}: an #ephemeral one drops messages; it is refused")
        if _NSQ_NAME.fullmatch(name) is None:
            raise ConfigurationError(
                f"{setting}: must be 1 to 64 letters, digits, dots, dashes or underscores"
            )


def check_redis_names(stream: str, group: str, payload_field: str) -> None:
    """Refuse names with blanks or control characters, which are always mistakes."""
    named = (
        ("REDIS_STREAM", stream),
        ("REDIS_GROUP", group),
        ("REDIS_PAYLOAD_FIELD", payload_field),
    )
    for setting, name in named:
        if _REDIS_NAME.fullmatch(name) is None:
            raise ConfigurationError(f"{setting}: must be 1 to 255 characters without blanks")
