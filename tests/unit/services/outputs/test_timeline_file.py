"""The last steps of a file that a trainer writes, whatever is in it."""

from __future__ import annotations

import json
from pathlib import Path

from gxpo_services.outputs import timeline
from gxpo_services.outputs.files import RunFiles
from gxpo_services.outputs.timeline import last_steps


def line(step: int) -> str:
    row = {"attempt": 1, "step": step, "time": 2.0, "begin": 1.5, "spans": [["learner", "updating", 0.0, 0.5]]}
    return json.dumps(row) + "\n"


def write(root: Path, text: str) -> RunFiles:
    (root / "r1").mkdir()
    (root / "r1" / "timeline.jsonl").write_text(text, encoding="utf-8")
    return RunFiles(root, "r1")


def test_the_last_steps_are_read_in_order(tmp_path: Path) -> None:
    steps = last_steps(write(tmp_path, "".join(map(line, range(9)))), 2)
    assert [item.step for item in steps] == [7, 8]
    assert steps[0].spans[0].model_dump() == {"process": "learner", "activity": "updating", "begin": 0.0, "end": 0.5}


def test_other_lines_are_left_out(tmp_path: Path) -> None:
    torn = line(3)[:20]
    others = ["[1]\n", "null\n", json.dumps({"spans": [["too", "short"]]}) + "\n", "\n"]
    assert [item.step for item in last_steps(write(tmp_path, "".join([*others, line(2), torn])), 9)] == [2]


def test_a_long_file_is_read_from_its_end_only(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(timeline, "LARGEST_TAIL", 2 * len(line(1)) + 5)
    assert [item.step for item in last_steps(write(tmp_path, "".join(map(line, range(6)))), 9)] == [4, 5]


def test_a_run_without_a_timeline_has_none(tmp_path: Path) -> None:
    assert last_steps(RunFiles(tmp_path, "r2"), 3) == []
