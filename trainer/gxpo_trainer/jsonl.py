"""JSON lines on disk: written whole, read strictly, with NaN and the infinities as words.

JSON has no number for NaN and ±∞, so they are the strings "NaN", "Infinity", "-Infinity" in every file and
answer of gxpo. A line is one write(2) on an append-only descriptor: a reader never sees half of one while
the writer lives, and a kill can tear the last line only, which the next opening for writing cuts off.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gxpo_trainer.errors import DataError, TrainingError

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
Row = dict[str, Any]


class JsonLines:
    """An append-only file of JSON objects. `bytes_cut`: what opening removed of a torn last line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._fd).st_size
        whole = _whole_size(self._fd, size)
        self.bytes_cut = size - whole
        if self.bytes_cut:
            os.ftruncate(self._fd, whole)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one line whole. A write that the disk cuts short is taken back before TrainingError is raised."""
        data = (json.dumps(plain(row), ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "backslashreplace")
        before = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            written, failure = 0, error
        else:
            failure = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if written < len(data):
            os.ftruncate(self._fd, before)
            full = failure.errno in (errno.ENOSPC, errno.EDQUOT)
            message = f"{self.path}: cannot be written ({failure.strerror}); free space or choose another folder"
            raise TrainingError(message, reason="disk_full" if full else "training_error") from failure

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1


def read_lines(path: Path) -> Iterator[Row]:
    """The objects of a file, none when it does not exist yet.

    A last line without its newline is still being written and is left out. Raises DataError (file and line)
    for any other line that is no JSON object.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}, line {number}: is not JSON ({error}); remove the line") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: is no JSON object; remove the line")
            yield row


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a JSON file in one step: whoever reads it finds the old content or the new one, never half."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        json.dump(plain(value), file, indent=2, ensure_ascii=False, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def decode_number(value: Any) -> float:
    """A JSON number, or one of the three words for what JSON has no number for. Raises ValueError otherwise."""
    if isinstance(value, str) and value in _WORDS:
        return _WORDS[value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is no number")
    return float(value)


def plain(value: Any) -> Any:
    """Numbers, texts, lists and objects as JSON has them; numpy's by their own `tolist`."""
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)


def _whole_size(fd: int, size: int) -> int:
    """Length of the file up to the end of its last line that is whole and JSON."""
    data = b""
    start = size
    while start > 0:
        block = min(start, 1 << 16)
        start -= block
        data = os.pread(fd, block, start) + data
        end = data.rfind(b"\n")
        while end >= 0:
            begin = data.rfind(b"\n", 0, end)
            if begin < 0 and start > 0:
                break
            if _is_json(data[begin + 1 : end]):
                return start + end + 1
            end = begin
    return 0


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
