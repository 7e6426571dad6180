"""`make bench`: every measurement in turn, each in a process of its own."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Run each benchmark with its defaults; the first failure's exit code."""
    names = sorted(
        module.name
        for module in pkgutil.iter_modules([str(Path(__file__).parent)])
        if not module.name.startswith("_")
    )
    for name in names:
        print(f"bench: {name}", flush=True)
        done = subprocess.run([sys.executable, "-m", f"bench.{name}"], check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
