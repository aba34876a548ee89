"""Rows of data files with their location, for error messages. Free of torch.

Reads a .jsonl, .csv or .parquet file, a local folder in the layout of a hub data set, or a hub data set by name, which
is downloaded first.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from gxpo_trainer.errors import DataError
from gxpo_trainer.jsonl import local_path

SUFFIXES = (".jsonl", ".csv", ".parquet")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_MOST_SEEN = 10_000
"""Files of a folder among which a message looks for data files: the folder may be anything."""


@dataclass(frozen=True, slots=True)
class Record:
    """One row. `location` is `file:line`, or `file, row n` for parquet, both counted from 1; of a row of several lines
    the last one."""

    location: str
    name: str
    """Default id of the row: file stem and number."""
    fields: dict[str, Any]


def find_files(source: str, split: str, subset: str | None) -> list[Path]:
    """The data files of `data.source`, in reading order.

    Raises DataError when the source is neither a data file, a folder with that split, nor a reachable hub name.
    """
    path = local_path(source)
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise DataError(f"data.source = {source!r} ends in {path.suffix!r}; use a .jsonl, .csv or .parquet file")
        return [path]
    if path.is_dir():
        return files_of_split(path, split, subset)
    if not on_hub(source):
        raise DataError(
            f"data.source = {source!r} does not exist; set it to a .jsonl, .csv or .parquet file, a folder or "
            "a hub name"
        )
    homes = ["" if home == "." else f"{home}/" for home in _homes(subset)]
    patterns = [f"{home}{glob.escape(split)}{rest}" for home in homes for rest in ("-*", ".*", "/*")]
    copy = download(
        source,
        patterns,
        problem=f"data.source = {source!r} is not a local file or folder and cannot be downloaded from the hub",
        fix="set it to a local copy, or check the name and the connection",
    )
    return files_of_split(copy, split, subset, source)


def on_hub(source: str) -> bool:
    """Whether `data.source` is looked up in the hub: nothing here has this name, and the hub's could be it."""
    path = local_path(source)
    named = path.suffix not in (*SUFFIXES, ".json") and _HUB_NAME.fullmatch(source) is not None
    return named and not path.exists()


def files_of_split(folder: Path, split: str, subset: str | None, repository: str = "") -> list[Path]:
    """Files of one split in hub layout: data/train-00000-of-00001.parquet, main/train-….parquet (subset `main`),
    train.jsonl, or train/….jsonl. Parquet files take precedence over JSONL files, and those over CSV files.

    repository: of the hub, of which the folder has a part.
    """
    name = glob.escape(split)  # `**` would walk through all folders
    for home in _homes(subset):
        for suffix in (".parquet", ".jsonl", ".csv"):
            patterns = (f"{name}-*{suffix}", f"{name}{suffix}", f"{name}/*{suffix}")
            with suppress(NotImplementedError, ValueError):  # of names such as /
                files = sorted({file for pattern in patterns for file in (folder / home).glob(pattern)})
                if files:
                    return files
    seen = islice(folder.rglob("*"), _MOST_SEEN)
    present = sorted(str(file.relative_to(folder)) for file in seen if file.suffix in SUFFIXES)
    if repository:
        from huggingface_hub import HfApi

        with suppress(Exception):  # as in `download`
            present = [
                name for name in HfApi().list_repo_files(repository, repo_type="dataset") if name.endswith(SUFFIXES)
            ]
    listed = ", ".join(present[:8]) or "none"
    raise DataError(
        f"{repository or folder} has no files of data.split = {split!r}, data.subset = {subset!r}; "
        f"set the two to match one of its .jsonl, .csv and .parquet files: {listed}"
    )


def _homes(subset: str | None) -> tuple[str, ...]:
    return (subset, f"data/{subset}") if subset else ("data", ".")


def download(name: str, patterns: list[str], *, problem: str, fix: str) -> Path:
    """Download the matching files of a hub data set, or reuse the cached copy.

    Raises DataError with `problem`, the cause and `fix`.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns))
    except Exception as error:  # the hub client raises many types: offline, unknown name, no access
        cause = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        raise DataError(f"{problem}: {cause}; {fix}") from error


def read_records(files: Iterable[Path], most: int | None = None) -> list[Record]:
    """The first `most` rows of the files, None: all.

    Raises DataError for a file that cannot be read, and with the line of the first row that cannot be read.
    """
    readers = {".parquet": _parquet, ".csv": _csv}
    try:
        return list(islice((row for file in files for row in readers.get(file.suffix, _jsonl)(file)), most))
    except OSError as error:
        raise DataError(
            f"{error.filename}: cannot be read ({error.strerror}); check the path and its permissions"
        ) from None


def _csv(file: Path) -> Iterator[Record]:
    """Rows of a comma-separated UTF-8 file, whose first line names the columns; an empty cell is None.

    A column without a name, as pandas writes for its index, is left out.
    """
    csv.field_size_limit(sys.maxsize)
    with file.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream, strict=True)
        try:
            names = reader.fieldnames or []
            if len(names) == 1 and (separator := re.search("[;\t]", names[0])):
                raise DataError(f"{file}:1: columns are separated by {separator[0]!r}; save it with commas")
            if len({*names}) < len(names):
                raise DataError(f"{file}:1: the first line must name each column once; its names: {', '.join(names)}")
            for number, row in enumerate(reader, start=1):
                location = f"{file}:{reader.line_num}"
                if None in row or None in row.values():
                    fix = "quote cells that contain commas, and leave none out"
                    raise DataError(f"{location}: does not have the {len(names)} cells of the first line; {fix}")
                yield Record(
                    location, f"{file.stem}/{number}", {name: cell or None for name, cell in row.items() if name}
                )
        except (UnicodeDecodeError, csv.Error) as error:  # text is decoded ahead of the line that is read
            place = f"{file}:{reader.line_num}" if isinstance(error, csv.Error) else file
            raise DataError(f"{place}: is not valid CSV ({error}); save it as UTF-8 CSV") from None


def _jsonl(file: Path) -> Iterator[Record]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            location = f"{file}:{number}"
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{location}: is not valid JSON ({error}); write one object per line") from None
            if not isinstance(fields, dict):
                raise DataError(f"{location}: is a {type(fields).__name__}; write one object per line")
            yield Record(location, f"{file.stem}/{number}", fields)


def _parquet(file: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        reader = pyarrow.parquet.ParquetFile(file)
        rows = (fields for batch in reader.iter_batches(batch_size=1024) for fields in batch.to_pylist())
        for number, fields in enumerate(rows, start=1):
            yield Record(f"{file}, row {number}", f"{file.stem}/{number}", fields)
    except (pyarrow.ArrowException, OSError, OverflowError, ValueError) as error:  # also a date after 9999, no UTF-8
        raise DataError(f"{file}: cannot be read as parquet: {error}") from None


def sha256_of_file(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
