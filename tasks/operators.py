"""Who stands in the audit of a manual action."""

from __future__ import annotations

import getpass
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.settings import Settings


def operator_of(settings: Settings) -> str:
    """OPERATOR, or the user of the operating system who runs the command."""
    if settings.operator:
        return settings.operator
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        # A container's user need not have a name.
        return f"uid-{os.getuid()}"


def task_actor(settings: Settings) -> str:
    """The worker, for what came in as a task: who published it is not known to it."""
    return f"task ({settings.operator})" if settings.operator else "task"
