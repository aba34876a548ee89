"""Numbers and durations are readable."""

from __future__ import annotations

import math

import pytest

from gxpo_client import formats


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0.0 s"), (0.0042, "4.2 ms"), (4.24, "4.2 s"), (59, "59 s"), (75, "1 min 15 s"), (11520, "3 h 12 min"),
        (200_000, "2 d 7 h"), (None, "–"), (math.nan, "–"),
    ],
)  # fmt: skip
def test_durations(seconds: float | None, words: str) -> None:
    assert formats.duration(seconds) == words


def test_figures() -> None:
    assert formats.percent(0.4132) == "41.3%"
    assert formats.count(12345.0) == "12,345"
    assert formats.count(1.5) == "1.50"
    assert formats.figure(0.00012346) == "0.0001235"
    assert formats.size(1536) == "1.5 KiB"
    assert formats.size(512) == "512 B"
    assert formats.moment(0) == "1970-01-01 00:00:00 UTC"
    assert formats.percent(math.nan) == formats.NONE
    assert (formats.figure(-1.5), formats.count(-2), formats.percent(-0.5)) == ("−1.5", "−2", "−50.0%")
    assert formats.figure(1e-7) == "1e−07"
