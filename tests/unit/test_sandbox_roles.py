"""How the sandbox starts its roles."""

from __future__ import annotations

from pathlib import Path

from sandbox import roles


def test_a_worker_begins_with_an_empty_folder_for_its_temporary_files(tmp_path: Path) -> None:
    def start() -> Path:
        place = roles.Place(tmp_path, {})
        spec = roles.celery_worker(place, {}, name="worker", queue="charges", slots=1)
        return Path(spec.environment["TMPDIR"])

    folder = start()
    assert folder.is_relative_to(tmp_path)
    (folder / "left-by-one-that-was-killed").mkdir()
    assert list(start().iterdir()) == []
