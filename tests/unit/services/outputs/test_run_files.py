"""Only what lies in a run's folder is opened, and nothing that blocks; and the last steps of its timeline."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gxpo_services.outputs import timeline
from gxpo_services.outputs.files import RunFiles
from gxpo_services.outputs.timeline import last_steps


@pytest.fixture
def run(tmp_path: Path) -> RunFiles:
    folder = tmp_path / "artifacts" / "r1"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "file").write_text("inside")
    (tmp_path / "artifacts" / "other").write_text("outside")
    return RunFiles(tmp_path / "artifacts", "r1")


def test_a_file_below_is_read(run: RunFiles) -> None:
    assert run.read("a", "b", "file", most_bytes=6) == b"inside"
    assert run.names("a") == ["b"]
    assert run.files() == [("a", "b", "file")]
    assert run.status("a", "b", "file").st_size == 6
    with pytest.raises(ValueError, match="larger than 5 bytes"):
        run.read("a", "b", "file", most_bytes=5)


@pytest.mark.parametrize(
    "parts",
    [("..", "other"), ("a", "..", "..", "other"), ("a/b/file",), ("",), (".",), ("a\0",), ("none",), ("x" * 300,)],
)
def test_what_is_no_name_of_something_below_does_not_exist(run: RunFiles, parts: tuple[str, ...]) -> None:
    with pytest.raises(FileNotFoundError):
        run.open(*parts)
    with pytest.raises(FileNotFoundError):
        run.names(*parts, "more")


def test_links_pipes_and_folders_are_no_files(run: RunFiles, tmp_path: Path) -> None:
    folder = tmp_path / "artifacts" / "r1"
    (folder / "link").symlink_to(tmp_path / "artifacts" / "other")
    (folder / "linked_folder").symlink_to(tmp_path / "artifacts")
    os.mkfifo(folder / "pipe")
    for parts in (("link",), ("linked_folder", "other"), ("pipe",), ("a",)):
        with pytest.raises(FileNotFoundError):
            run.open(*parts)
    assert run.files() == [("a", "b", "file")]
    (tmp_path / "artifacts" / "r2").symlink_to(folder)
    with pytest.raises(FileNotFoundError):
        RunFiles(tmp_path / "artifacts", "r2").names()


def test_a_long_file_is_read_from_its_end_only(run: RunFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"attempt": 1, "time": 2.0, "begin": 1.5, "spans": [["learner", "updating", 0.0, 0.5]]}
    lines = [json.dumps(row | {"step": step}) + "\n" for step in range(6)]
    (tmp_path / "artifacts" / "r1" / "timeline.jsonl").write_text("".join(lines))
    monkeypatch.setattr(timeline, "LARGEST_TAIL", 2 * len(lines[0]) + 5)
    assert [item.step for item in last_steps(run, 9)] == [4, 5]
