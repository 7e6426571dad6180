"""The cluster's files: who may read them, and which go when a stack begins anew."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox import postgres
from sandbox.processes import MARK, SandboxError
from sandbox.stack import Stack


@pytest.fixture
def old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the private folder of the stack in `tmp_path / "stack"`."""
    monkeypatch.setattr(postgres, "PRIVATE_PARENT", tmp_path)
    folder = postgres.private_folder(tmp_path / "stack")
    (folder / "data").mkdir()
    file = folder / "data" / "PG_VERSION"
    file.touch()
    return file


def test_a_new_stack_drops_the_data_of_a_removed_one_and_keeps_its_own(old_file: Path) -> None:
    directory = old_file.parent.parent.parent / "stack"
    Stack(directory, names=("redis",)).prepare()
    assert not old_file.exists()
    old_file.parent.mkdir(parents=True)
    old_file.touch()
    Stack(directory, names=("redis",)).prepare()
    assert old_file.exists()


def test_data_that_a_process_may_still_use_is_not_dropped(old_file: Path) -> None:
    directory = old_file.parent.parent.parent / "stack"
    command = [sys.executable, "-c", "print(flush=True); input()"]
    environment = {**os.environ, MARK: str(directory)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment) as left:
        try:
            assert left.stdout is not None
            assert left.stdout.readline(), "it runs, and shows its environment"
            with pytest.raises(SandboxError, match="still runs"):
                Stack(directory, names=("redis",)).prepare()
        finally:
            left.kill()
    assert old_file.exists()


def test_the_password_of_a_new_cluster_is_its_owners_only_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []

    def look(path: Path) -> None:
        seen.append((path.read_text(), path.stat().st_mode & 0o777))

    monkeypatch.setattr(postgres.Postgres, "_give", lambda _, path: path.is_dir() or look(path))
    monkeypatch.setattr(postgres.Postgres, "_initdb", lambda _, path: look(path))
    before = os.umask(0o022)
    try:
        postgres.Postgres(tmp_path, tmp_path / "data", None, 1, "secret").make_cluster()
    finally:
        os.umask(before)
    assert seen == [("secret", 0o600)] * 2
    assert not (tmp_path / "password").exists()
