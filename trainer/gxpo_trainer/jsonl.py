"""JSON lines files with atomic appends, strict reading, and strings for NaN and infinities.

JSON cannot represent NaN and ±∞, so gxpo's files and REST API use the strings "NaN", "Infinity" and "-Infinity". Each
line is one write(2) to an append-only descriptor, so readers see whole lines; a kill can tear only the last one, which
the next writer truncates.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import mmap
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gxpo_trainer.errors import ConfigError, DataError, TrainingError

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
Row = dict[str, Any]


class JsonLines:
    """An append-only file of JSON objects. `bytes_cut`: bytes of a torn last line that opening has truncated."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._fd).st_size
        whole = _whole_size(self._fd, size)
        self.bytes_cut = size - whole
        if self.bytes_cut:
            os.ftruncate(self._fd, whole)

    def append(self, row: Mapping[str, Any]) -> None:
        """Append one line atomically, from any thread. A partial write is undone, then TrainingError is raised."""
        data = (json.dumps(plain(row), ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "backslashreplace")
        with self._lock:
            before = os.fstat(self._fd).st_size
            try:
                if os.write(self._fd, data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                os.ftruncate(self._fd, before)
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                message = f"{self.path}: cannot write ({error.strerror}); free disk space or choose another folder"
                raise TrainingError(message, reason="disk_full" if full else "training_error") from error

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1


def read_lines(path: Path) -> Iterator[Row]:
    """Yield the objects of a file; nothing if it does not exist.

    An unterminated last line is skipped, because it is still being written. Raises DataError (file and line) for any
    other line that is not a JSON object.
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
                raise DataError(f"{path}, line {number}: is not a JSON object; remove the line")
            yield row


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a JSON file atomically."""
    replace_file(path, json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def replace_file(path: Path, text: str, mode: int = 0o666) -> None:
    """Replace a file atomically. mode: who may use it, less the umask."""
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)


def local_path(name: str) -> Path:
    """With ~ as the home folder. Path.expanduser raises RuntimeError for the ~name of no account."""
    return Path(os.path.expanduser(name))  # noqa: PTH111


def make_folder(folder: Path, option: str = "--out") -> None:
    """Create the folder that an option names, if it is missing. Raises ConfigError with the reason."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.is_dir() and not os.access(folder, os.W_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        verb, reason = ("write into", error.strerror) if folder.is_dir() else ("create", error.strerror)
        reason = "a file has this name" if isinstance(error, FileExistsError) else reason
        raise ConfigError(f"{option} {folder}: cannot {verb} the folder ({reason}); choose another one") from error


def check_output(file: Path, option: str = "--out") -> None:
    """Raise ConfigError now for a file that cannot be written later. An existing one keeps its content."""
    make_folder(file.parent, option)
    try:
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        part = file.with_name(f"{file.name}.part")
        part.touch()
        part.unlink()
    except OSError as error:
        raise ConfigError(f"{option} {file}: cannot write the file ({error.strerror}); choose another one") from error


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of files to disk (fsync)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def decode_number(value: Any) -> float:
    """Decode a JSON number or one of the three strings for non-finite values. Raises ValueError for anything else."""
    if isinstance(value, str) and value in _WORDS:
        return _WORDS[value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def plain(value: Any) -> Any:
    """Convert a value to JSON types; numpy values through `tolist`."""
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


def restored(value: Any) -> Any:
    """What `plain` has converted and JSON has kept, with the three strings for non-finite values as numbers again."""
    if isinstance(value, dict):
        return {name: restored(item) for name, item in value.items()}
    if isinstance(value, list):
        return [restored(item) for item in value]
    return _WORDS.get(value, value) if isinstance(value, str) else value


def _whole_size(fd: int, size: int) -> int:
    """File size up to the end of the last complete line of valid JSON."""
    if not size:
        return 0
    with mmap.mmap(fd, size, access=mmap.ACCESS_READ) as data:
        end = data.rfind(b"\n")
        while end >= 0:
            begin = data.rfind(b"\n", 0, end)
            with contextlib.suppress(ValueError):
                json.loads(data[begin + 1 : end])
                return end + 1
            end = begin
    return 0
