"""Runs a command as a user that has a name: `named_user.py UID GID -- COMMAND…`.

initdb insists on finding its user in the system's list; in a container the user is often a bare
number. A user namespace gives it the number of an account that is listed, while every file still
belongs to the real user. No privileges are gained or needed.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

CLONE_NEWUSER = 0x10000000


def main(arguments: list[str]) -> None:
    uid, gid, separator, *command = arguments
    assert separator == "--", "usage: named_user.py UID GID -- COMMAND..."
    real_uid, real_gid = os.geteuid(), os.getegid()
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER) != 0:
        sys.exit("this user has no name, and user namespaces are not allowed here")
    own = Path("/proc/self")
    (own / "uid_map").write_text(f"{uid} {real_uid} 1")
    # The kernel wants this promise before an unprivileged user may map a group.
    (own / "setgroups").write_text("deny")
    (own / "gid_map").write_text(f"{gid} {real_gid} 1")
    os.execvp(command[0], command)  # noqa: S606 - the point of this script


if __name__ == "__main__":
    main(sys.argv[1:])
