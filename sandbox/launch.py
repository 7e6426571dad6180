"""Becomes one role's program: `launch.py PARENT SIGNAL UID GID -- COMMAND…`.

Runs between fork and the real program, as a plain script (no imports of ours), so that the
parent needs no code after its fork. It drops to UID and GID (`-`: stay), then asks the kernel
for SIGNAL when the parent dies; in this order, since a change of user clears that wish.
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    parent, death_signal, uid, gid, separator, *command = arguments
    assert separator == "--", "usage: launch.py PARENT SIGNAL UID GID -- COMMAND..."
    if uid != "-":
        os.setgroups([])
        os.setgid(int(gid))
        os.setuid(int(uid))
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit("the sandbox is gone")
    os.execvp(command[0], command)  # noqa: S606 - the point of this script


if __name__ == "__main__":
    main(sys.argv[1:])
