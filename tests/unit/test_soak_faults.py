"""What the soak does to files."""

from __future__ import annotations

from pathlib import Path

from benchmarks.faults import cut_after


def test_a_file_is_cut_in_the_middle_of_the_first_row_of_a_later_step(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    rows = ['{"step": 1, "x": 0}\n', '{"step": 2, "x": 0}\n', '{"step": 3, "x": 0}\n', '{"step": 4, "x": 0}\n']
    file.write_text("".join(rows))
    cut_after(file, 4)
    assert file.read_text() == "".join(rows)
    cut_after(file, 2)
    assert file.read_text() == "".join(rows[:2]) + '{"step": 3'
    # What an earlier cut left is no row.
    cut_after(file, 1)
    assert file.read_text() == rows[0] + '{"step": 2'
    cut_after(tmp_path / "missing.jsonl", 0)
    assert not (tmp_path / "missing.jsonl").exists()
