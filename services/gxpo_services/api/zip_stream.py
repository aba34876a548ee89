"""A zip archive as a stream: made while it is sent, so that it needs neither disk nor the memory for all of it."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator


class _Sink:
    """What zipfile writes into; it cannot be seeked in, so sizes follow each file instead of preceding it."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is held."""

    def take(self) -> bytes:
        taken = b"".join(self._parts)
        self._parts.clear()
        return taken


def zip_stream(files: Iterable[tuple[str, Iterable[bytes]]], *, compress: bool = True) -> Iterator[bytes]:
    """Bytes of a zip of `files`: (name in the archive, its content in pieces). Files may pass 4 GiB."""
    sink = _Sink()
    method = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(sink, "w", method, compresslevel=3) as archive:
        for name, pieces in files:
            with archive.open(name, "w", force_zip64=True) as entry:
                for piece in pieces:
                    entry.write(piece)
                    if data := sink.take():
                        yield data
    yield sink.take()
