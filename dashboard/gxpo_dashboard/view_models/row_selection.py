"""Selected items of a table whose rows move, while the browser knows them by row. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class RowSelection:
    """Which ids are selected. Call `report` with the rows that the browser reports, then `place` with the new order.

    A report may be older than the last order, which was still on its way to the browser. Rows that were sent with an
    earlier order, and not confirmed since, therefore stand for the same ids, and only others for a new selection.
    """

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._chosen: set[str] = set()
        self._sent: list[list[int]] = [[]]

    def report(self, rows: Sequence[int]) -> None:
        """Take what the browser has selected."""
        found = sorted(rows)
        if found in self._sent:
            del self._sent[: self._sent.index(found)]
        else:
            self._chosen = {self._ids[row] for row in found if row < len(self._ids)}
            self._sent = [found]

    def place(self, ids: Sequence[str]) -> list[int]:
        """The selected rows of the order `ids`, which is sent to the browser; ids that are gone are not selected."""
        self._ids = list(ids)
        self._chosen &= set(ids)
        rows = [row for row, found in enumerate(ids) if found in self._chosen]
        if rows != self._sent[-1]:
            self._sent.append(rows)
        return rows
