"""What `make setup` takes from the locks, and what it notices."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox import bootstrap


def test_build_tools_are_cut_out_of_the_lock_with_their_hashes() -> None:
    text = bootstrap._locked_only(bootstrap.BUILD_TOOLS)
    entries = [line for line in text.splitlines() if "==" in line]
    assert [entry.partition("==")[0] for entry in entries] == sorted(bootstrap.BUILD_TOOLS)
    for entry in text.split("\n\n"):
        assert "--hash=sha256:" in entry


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-dev.lock"])
def test_every_locked_package_has_a_hash(lock: str) -> None:
    lines = (bootstrap.CHECKOUT / lock).read_text().splitlines()
    starts = [n for n, line in enumerate(lines) if line and line[0].isalnum()]
    assert len(starts) > 10
    for start in starts:
        assert "--hash=sha256:" in lines[start + 1], lines[start]


def test_a_stamp_of_another_checkout_is_another_stamp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = bootstrap._stamp()
    monkeypatch.setattr(bootstrap, "CHECKOUT", tmp_path)
    (tmp_path / "pyproject.toml").write_bytes(
        (bootstrap.LOCK.parent / "pyproject.toml").read_bytes()
    )
    there = bootstrap._stamp()
    assert there[0] != here[0]
    assert there[1:] == here[1:]


def test_a_program_that_does_not_run_is_not_taken_for_python(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    assert not bootstrap._runs(broken)
    broken.write_text("#!/nonexistent/python\n")
    broken.chmod(0o755)
    assert not bootstrap._runs(broken)


def test_a_checkout_that_cannot_be_written_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Below a file: nobody can write there, root neither.
    cache = tmp_path / "file" / ".cache"
    cache.parent.touch()
    monkeypatch.setattr(bootstrap, "CACHE", cache)
    assert bootstrap.main() == 1
    assert capsys.readouterr().err == f"setup: {cache} cannot be used: Not a directory\n"
