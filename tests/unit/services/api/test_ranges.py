"""The Range header, by hand on a file of ten bytes."""

from __future__ import annotations

import pytest

from gxpo_services.api.errors import RangeNotSatisfiable
from gxpo_services.api.streams import requested_range


@pytest.mark.parametrize(
    ("header", "part"),
    [
        ("bytes=0-", (0, 10)),
        ("bytes=3-5", (3, 6)),
        ("bytes=9-9", (9, 10)),
        ("bytes=3-999", (3, 10)),
        ("bytes=-3", (7, 10)),
        ("bytes=-999", (0, 10)),
        # A server may ignore what it does not understand, and several ranges.
        (None, None),
        ("bytes=-", None),
        ("bytes=5-3", None),
        ("bytes=0-1,3-4", None),
        ("items=0-1", None),
    ],
)
def test_a_range_of_ten_bytes(header: str | None, part: tuple[int, int] | None) -> None:
    assert requested_range(header, 10) == part


@pytest.mark.parametrize("header", ["bytes=10-", "bytes=10-20", "bytes=-0"])
def test_a_range_behind_the_end_is_refused(header: str) -> None:
    with pytest.raises(RangeNotSatisfiable):
        requested_range(header, 10)
