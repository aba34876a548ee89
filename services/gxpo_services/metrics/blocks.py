"""Binary encoding of metric blocks: records of (step int32, value float64), little-endian, 12 bytes each.

One database row holds 128 steps of a metric instead of one value: ingest appends bytes, a chart of 5,000 steps reads 40
rows, and NaN and the infinities keep their bits. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

BLOCK_STEPS = 128
RECORD = np.dtype([("step", "<i4"), ("value", "<f8")])

Records = npt.NDArray[np.void]


def encode(rows: Iterable[tuple[int, Mapping[str, float]]]) -> dict[tuple[str, int], bytes]:
    """(metric, block) → bytes to append, from (step, {metric: value}) in order of arrival."""
    gathered: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for step, metrics in rows:
        block = step // BLOCK_STEPS
        for name, value in metrics.items():
            gathered.setdefault((name, block), []).append((step, value))
    return {key: np.array(values, dtype=RECORD).tobytes() for key, values in gathered.items()}


def decode(data: Iterable[bytes]) -> Records:
    """Records of several blocks of an attempt in order of steps; a repeated step keeps its last value."""
    joined = b"".join(data)
    records = np.frombuffer(joined, dtype=RECORD)
    if _ascends(records):
        return records
    records = records[np.argsort(records["step"], kind="stable")]
    last = np.append(np.diff(records["step"]) > 0, True)
    found: Records = records[last]
    return found


def one_history(by_attempt: Mapping[int, Records], first_steps: Mapping[int, int]) -> Records:
    """The history that counts: from the first step that an attempt reported on, it replaces all earlier ones.

    by_attempt: records of one metric in order of steps. first_steps: of every attempt of the run, those without this
    metric too. So what is left of an attempt lies before all that is left of later ones.
    """
    parts = []
    for attempt in sorted(by_attempt):
        later = [first for other, first in first_steps.items() if other > attempt]
        records = by_attempt[attempt]
        parts.append(records[records["step"] < min(later)] if later else records)
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, dtype=RECORD)


def _ascends(records: Records) -> bool:
    steps = records["step"]
    return bool((steps[1:] > steps[:-1]).all())
