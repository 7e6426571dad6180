"""Files that another process may read at any time: written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_atomically(path: Path, text: str, mode: int = 0o600) -> None:
    """Replaces the file in one step; `mode` counts for the new file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        file.write(text)
    temporary.replace(path)


def write_json(path: Path, value: Any, mode: int = 0o600) -> None:
    write_atomically(path, json.dumps(value, indent=1) + "\n", mode)


def read_json(path: Path) -> Any:
    """The value, or None when there is no readable file."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
