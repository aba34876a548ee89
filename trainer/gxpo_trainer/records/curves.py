"""Loads runs from their folders for a comparison. Free of torch; compare/rows.py turns rows into curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gxpo_trainer.compare.curves import RunCurves
from gxpo_trainer.compare.rows import SERIES_NAMES, STEP_TIMES, Series, run_curves
from gxpo_trainer.compare.seeds import SeedGroup, group_by_config
from gxpo_trainer.errors import DataError
from gxpo_trainer.jsonl import Row
from gxpo_trainer.records.reading import EVALUATIONS, read_evaluations, read_identity, read_metrics


def load_run(out_dir: Path, benchmark: str | None = None, metric: str = "pass@1") -> RunCurves:
    """Curves of one run from metrics.jsonl, evaluations.jsonl and run.json.

    benchmark: a name; by default the macro average of all benchmarks, at the steps where all were evaluated.
    metric: a name in `scores`. Raises DataError when the run has no such evaluation.
    """
    identity = read_identity(out_dir)
    chosen = None if benchmark is None else [benchmark]
    series = _series(read_metrics(out_dir))
    try:
        return run_curves(identity, read_evaluations(out_dir), series, benchmarks=chosen, metric=metric)
    except DataError as error:
        raise DataError(f"{out_dir / EVALUATIONS}: {error}") from None


def group_runs(folders: Sequence[Path], benchmark: str | None = None, metric: str = "pass@1") -> list[SeedGroup]:
    """Load runs and group those whose configs differ only in name and seed, in order of appearance.

    Raises DataError when a group has a seed twice.
    """
    return group_by_config(
        [(load_run(folder, benchmark, metric), read_identity(folder)["config"]) for folder in folders]
    )


def _series(rows: Sequence[Row]) -> Series:
    """The metrics that curves need, as arrays, from rows in order of steps."""
    found = {}
    for name in (*SERIES_NAMES, *STEP_TIMES):
        pairs = [(row["step"], row["metrics"][name]) for row in rows if name in row["metrics"]]
        if pairs:
            steps, values = np.array(pairs, dtype=np.float64).T
            found[name] = (steps, values)
    return found
