"""How a command asks the supervisor."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandbox import control
from sandbox.processes import SandboxError

WITHIN_S = 30.0


@contextmanager
def supervisor(folder: Path, *, impatient: int, answers: int) -> Iterator[list[bytes]]:
    """Gives up on so many requests, then answers so many; yields those that it has read."""
    read: list[bytes] = []

    def answer() -> None:
        for number in range(impatient + answers):
            link, _ = listener.accept()
            with link:
                if number >= impatient:
                    read.append(link.recv(1000))
                    link.sendall(b'{"roles": {}}\n')

    with control.listen(folder) as listener:
        listener.settimeout(WITHIN_S)
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield read
        thread.join(WITHIN_S)


def test_a_request_that_the_supervisor_did_not_wait_for_is_made_again(tmp_path: Path) -> None:
    with supervisor(tmp_path, impatient=2, answers=1) as read:
        assert control.ask(tmp_path, {"do": "status"}) == {"roles": {}}
    assert [json.loads(request) for request in read] == [{"do": "status"}]


def test_a_supervisor_that_never_answers_is_told_apart_from_one_that_is_not_there(
    tmp_path: Path,
) -> None:
    with (
        supervisor(tmp_path, impatient=control.TRIES, answers=0),
        pytest.raises(SandboxError, match="the supervisor went away"),
    ):
        control.ask(tmp_path, {"do": "status"})
    with pytest.raises(SandboxError, match="no stack is running here"):
        control.ask(tmp_path, {"do": "status"})
