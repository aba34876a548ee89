"""Executes the missing runs of a study, each as a `gxpo train` process of its own.

A process a run: one that crashes or runs out of memory takes no other with it, and a killed study continues each run
from its last checkpoint.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from gxpo_trainer.config.io import to_toml
from gxpo_trainer.errors import ConfigError, TrainingError
from gxpo_trainer.reporting.outcome import OUTCOME
from gxpo_trainer.reporting.reading import IDENTITY, has_curve, load_run
from gxpo_trainer.studies import definition
from gxpo_trainer.training.checkpoints import first_difference, with_run_commits

REGISTERED = "registered.json"
"""The study as it was before its first run, in its folder."""
_ATTEMPTS = 2
"""Launches of a run before the study gives up on it."""
_POLL_S = 1.0
_COMMAND = ("-m", "gxpo_trainer.cli")


@dataclass
class StudyRunner:
    """Runs a study in `root`, `jobs` runs at a time. say: receives one line for each start and end. known: results of
    runs that are not in `root`."""

    study: definition.Study
    root: Path
    jobs: int
    say: Callable[[str], None]
    known: definition.Results = field(default_factory=dict)
    _failures: dict[definition.RunKey, int] = field(default_factory=dict)
    _passes: int = 0
    """Backward passes of the runs that ended here, which took `_minutes` in all."""
    _minutes: float = 0.0

    def run(self) -> None:
        """Execute until nothing is missing. Raises TrainingError when a run failed twice, once the others ended."""
        if not self.known and not any((self.root / stage).exists() for stage in get_args(definition.Stage)):
            self.root.mkdir(parents=True, exist_ok=True)
            (self.root / REGISTERED).write_text(self.study.model_dump_json(indent=2) + "\n", encoding="utf-8")
        running: dict[definition.RunKey, tuple[subprocess.Popen[bytes], float]] = {}
        results = self.known
        try:
            while True:
                results = read_results(self.study, self.root, results)
                given_up = {key for key, count in self._failures.items() if count >= _ATTEMPTS}
                open_runs = [
                    key for key in definition.pending(self.study, results) if key not in running and key not in given_up
                ]
                for key in open_runs[: 0 if given_up else self.jobs - len(running)]:
                    self.say(f"{key.folder}: started ({self._progress(results)})")
                    running[key] = (self._start(key), time.monotonic())
                if not running:
                    break
                self._collect(running)
        except BaseException:
            for process, _ in running.values():
                process.terminate()
            for process, _ in running.values():
                process.wait()
            raise
        if given_up:
            logs = ", ".join(f"{self.root / key.folder}.log" for key in sorted(given_up, key=str))
            raise TrainingError(f"{len(given_up)} runs of the study failed twice; see the end of {logs}")

    def _progress(self, results: definition.Results) -> str:
        """What is done; and how long the rest takes at most, at the pace of the runs that ended here."""
        runs, passes = definition.largest_cost(self.study)
        text = f"{len(results)} of at most {runs} runs done"
        if not self._passes:
            return text
        left = passes - sum(definition.budget(self.study, key) for key in results)
        return f"{text}, at most about {left * self._minutes / self._passes / self.jobs:.0f} min left"

    def _start(self, key: definition.RunKey) -> subprocess.Popen[bytes]:
        folder = self.root / key.folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with Path(f"{folder}.log").open("ab") as log:
            file = Path(f"{folder}.toml")
            file.write_text(to_toml(definition.run_config(self.study, key)), encoding="utf-8")
            words = ["train", str(file), "--out", str(folder), "--continue"]
            return subprocess.Popen([sys.executable, *_COMMAND, *words], stdout=log, stderr=subprocess.STDOUT)

    def _collect(self, running: dict[definition.RunKey, tuple[subprocess.Popen[bytes], float]]) -> None:
        """Wait for some run to end, and record it."""
        while all(process.poll() is None for process, _ in running.values()):
            time.sleep(_POLL_S)
        for key, (process, begun) in list(running.items()):
            if process.poll() is None:
                continue
            del running[key]
            result = read_result(self.study, self.root, key)
            minutes = (time.monotonic() - begun) / 60
            if result is None:
                self._failures[key] = self._failures.get(key, 0) + 1
                log = Path(f"{self.root / key.folder}.log").read_text(encoding="utf-8", errors="replace")
                last = log.strip().rpartition("\n")[2] or "no output"
                self.say(f"{key.folder}: ended with exit code {process.returncode} after {minutes:.1f} min: {last}")
            else:
                self._passes += definition.budget(self.study, key)
                self._minutes += minutes
                end = "diverged" if result.diverged else f"accuracy {100 * result.accuracy:.1f}%"
                self.say(f"{key.folder}: {end} after {minutes:.1f} min")


def read_results(
    study: definition.Study, root: Path, known: definition.Results
) -> dict[definition.RunKey, definition.RunResult]:
    """The results of all complete runs that the study asks for: those known and those in a study's folder."""
    results = dict(known)
    while new := {
        key: result
        for key in definition.pending(study, results)
        if (result := read_result(study, root, key)) is not None
    }:
        results |= new
    return definition.without_superseded(study, results)


def read_result(study: definition.Study, root: Path, key: definition.RunKey) -> definition.RunResult | None:
    """The result of a run that reached its budget or diverged; None for any other.

    Raises ConfigError when the folder's run has other settings than the study now, and DataError for damaged files.
    """
    folder = root / key.folder
    if (folder / IDENTITY).exists():
        _check_settings(study, key, folder)
    try:
        outcome = json.loads((folder / OUTCOME).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    diverged = outcome["outcome"] == "failed" and outcome["reason"] == "diverged"
    if outcome["outcome"] != "succeeded" and not diverged:
        return None
    if diverged and not has_curve(folder):
        return definition.RunResult(0.0, diverged)
    return definition.RunResult(float(load_run(folder).curve.accuracy[-1]), diverged)


def _check_settings(study: definition.Study, key: definition.RunKey, folder: Path) -> None:
    """Raises ConfigError naming the first setting in which the folder's run differs from the study's."""
    config = with_run_commits(definition.run_config(study, key), folder)
    if (difference := first_difference(config, folder, more=("budget", "evaluation"))) is not None:
        name, before, after = difference
        raise ConfigError(
            f"{folder} is of a run with {name} = {before!r}, the study has {after!r}; restore the earlier value, "
            "delete the folder to repeat the run, or give the changed study another --out"
        )
