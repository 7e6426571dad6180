"""stripe-mock: Stripe's own server that knows every parameter of its API and keeps no state.

Built once by Go into .cache/bin, from the versions that tests/contract/stripe_mock pins.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import urllib3

from sandbox import bootstrap
from sandbox.binaries import BUILT, CHECKOUT
from sandbox.ports import free_port
from sandbox.processes import Processes, RoleSpec
from sandbox.roles import base_environment
from tests.support.waiting import wait_until

MODULE = CHECKOUT / "tests" / "contract" / "stripe_mock"
PACKAGE = "github.com/stripe/stripe-mock"
BINARY = BUILT / "stripe-mock"
READY_WITHIN_S = 60.0


def build() -> Path:
    """The path of the binary; builds it unless it is there from the same versions."""
    BUILT.mkdir(parents=True, exist_ok=True)
    stamp = BUILT / "stripe-mock.stamp"
    wanted = "".join(
        hashlib.sha256((MODULE / name).read_bytes()).hexdigest() for name in ("go.mod", "go.sum")
    )
    with (BUILT / "stripe-mock.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not BINARY.is_file() or not stamp.is_file() or stamp.read_text() != wanted:
            environment = bootstrap.own_environment()
            bootstrap.build_with_go(MODULE, {BINARY.name: PACKAGE}, environment)
            stamp.write_text(wanted)
    return BINARY


def _answers(url: str) -> bool:
    """Any answer counts, the refusal of a request without a key included."""
    try:
        urllib3.request("GET", url, retries=False, timeout=2)
    except urllib3.exceptions.HTTPError:
        return False
    return True


@contextmanager
def running(folder: Path) -> Iterator[str]:
    """A server; its base URL."""
    port = free_port()
    processes = Processes(folder)
    processes.start(
        RoleSpec(
            name="stripe-mock",
            command=(str(build()), "-http-addr", f"127.0.0.1:{port}"),
            directory=folder,
            log=folder / "stripe-mock.log",
            environment=base_environment(folder),
        )
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: _answers(url), READY_WITHIN_S, "stripe-mock answers")
        yield url
    finally:
        processes.kill_all()
