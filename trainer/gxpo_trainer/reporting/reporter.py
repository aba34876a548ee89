"""Writer of a run's files: metrics, samples, evaluations and events as JSON lines.

    run.json            identity of the run (identity.py); written once, attempts are appended
    metrics.jsonl       {"attempt", "step", "time", "metrics": {name: value}}
    samples.jsonl       {"attempt", "step", "time", "prompt_id", ..., "verdict", "reward", "length"}, in an environment
                        also {"turns": [{"speaker", "text", "reward"}], "end", "end_detail", "sampled_length"}
    evaluations.jsonl   {"attempt", "step", "time", "benchmark", "scores": {...}, "per_problem": [...], ...}
    events.jsonl        {"time", "kind", "message", ...}
    timeline.jsonl      {"attempt", "step", "time", "begin", "spans": [[process, activity, begin, end], ...]}

`time` is seconds since 1970; jsonl.py documents how lines and non-finite numbers are written.

A run that recovers from a checkpoint continues as a new attempt and repeats steps; reading.py merges the attempts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from gxpo_trainer.jsonl import JsonLines, Row, plain, write_json
from gxpo_trainer.reporting.reading import EVALUATIONS, EVENTS, IDENTITY, METRICS, SAMPLES, TIMELINE, read_identity
from gxpo_trainer.types import ScoredGroup


class RunReporter:
    """Writes the files of one run. Not thread-safe, but for `log_event`.

    Order: `start_attempt` first, then any of the log calls; `sync` before each checkpoint is published, so that no
    checkpoint is newer than its metrics on disk. A context manager, which closes the files.

    samples_per_step: groups per step written to samples.jsonl. show: text of a prompt's tokens, for samples.
    Raises TrainingError (`disk_full`) when the disk is full.
    """

    def __init__(
        self,
        out_dir: Path,
        *,
        samples_per_step: int = 4,
        show: Callable[[npt.NDArray[np.int32]], str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.out_dir = out_dir
        out_dir.mkdir(parents=True, exist_ok=True)
        self._attempt = self._continued = 1
        self._resume_step = 0
        self._samples_per_step = samples_per_step
        self._show, self._clock = show, clock
        self._files = {name: JsonLines(out_dir / name) for name in (METRICS, SAMPLES, EVALUATIONS, EVENTS, TIMELINE)}
        for name, file in self._files.items():
            if file.bytes_cut:
                self.log_event("torn_line", f"{name}: cut {file.bytes_cut} bytes of an unfinished line", file=name)

    def start_attempt(self, attempt: int, resume_step: int, continued: int | None = None) -> None:
        """Start `attempt`, whose first step is `resume_step + 1`.

        continued: the attempt that wrote the checkpoint. Rows up to `resume_step` (a postponed evaluation) are added to
        its rows: under the new attempt they would replace them.
        """
        self._attempt, self._resume_step, self._continued = attempt, resume_step, continued or attempt
        how = "started" if attempt == 1 and resume_step == 0 else f"continues after step {resume_step}"
        self.log_event("attempt", f"attempt {attempt} {how}", attempt=attempt, resume_step=resume_step)

    def _head(self, step: int) -> Row:
        attempt = self._attempt if step > self._resume_step else self._continued
        return {"attempt": attempt, "step": step, "time": self._clock()}

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one row for (attempt, step); a second row of a step adds its metrics to the first."""
        self._files[METRICS].append({**self._head(step), "metrics": dict(metrics)})

    def log_samples(self, step: int, groups: Sequence[ScoredGroup]) -> None:
        """The first `samples_per_step` groups, one line a response; what is missing (no answer) is null."""
        head = self._head(step)
        for index, scored in enumerate(groups[: self._samples_per_step]):
            prompt = scored.group.prompt
            for number, (sample, verdict) in enumerate(zip(scored.group.samples, scored.verdicts, strict=True)):
                own = sample.prompt_token_ids
                ids = scored.group.prompt_token_ids if own is None else own
                shown = {} if self._show is None else {"rendered_prompt": self._show(ids)}
                row = {
                    **head,
                    "prompt_id": prompt.id,
                    "group": index,
                    "sample": number,
                    "prompt": prompt.text,
                    **shown,
                    "response": sample.text,
                    "extracted": verdict.extracted,
                    "gold": prompt.gold,
                    "verdict": verdict.status,
                    "detail": verdict.detail,
                    "reward": verdict.reward,
                    "components": verdict.reward_components,
                    "length": sample.num_sampled + sample.num_observed,
                    "truncated": sample.truncated,
                    "weights_version": scored.group.weights_version,
                }
                if (episode := sample.episode) is not None:
                    row["turns"] = [{"speaker": t.speaker, "text": t.text, "reward": t.reward} for t in episode.turns]
                    # `length` also counts tokens that the environment wrote.
                    row |= {"end": episode.end, "end_detail": episode.detail, "sampled_length": sample.num_sampled}
                if prompt.source:
                    row["source"] = prompt.source
                if sample.branches:
                    row["branches"] = len(sample.branches)
                elif len(sample.versions) > 1:  # weights changed in flight: (version, number of tokens) of each part
                    row["versions"] = sample.versions
                self._files[SAMPLES].append(row)

    def log_evaluation(self, step: int, record: Mapping[str, Any]) -> None:
        """Write one evaluation; attempt, step and time are added to `record`."""
        head = self._head(step)
        self._files[EVALUATIONS].append({**head, **{k: v for k, v in record.items() if k not in head}})

    def log_timeline(self, step: int, begin: float, spans: Iterable[tuple[str, str, float, float]]) -> None:
        """What each process did in a step: (process, activity, begin, end), written relative to the step's begin."""
        relative = [[process, activity, round(b - begin, 3), round(e - begin, 3)] for process, activity, b, e in spans]
        self._files[TIMELINE].append({**self._head(step), "begin": begin, "spans": relative})

    def log_event(self, kind: str, message: str, **fields: Any) -> None:
        """Write an event for the user: a restart, a fallback, a checkpoint, the end."""
        self._files[EVENTS].append({"time": self._clock(), "kind": kind, "message": message, **fields})

    def write_identity(self, identity: Mapping[str, Any], attempt: int = 1, *, resumed: bool = False) -> None:
        """Write run.json before `attempt` starts.

        resumed: from a checkpoint. The identity stays that of the first attempt, and what changed is recorded.
        """
        path = self.out_dir / IDENTITY
        first = read_identity(self.out_dir) if path.exists() else {}
        past = first.pop("attempts", [])
        head: Row = {"attempt": attempt, "time": self._clock()}
        if not resumed:
            first = dict(identity)
        else:
            head["changed"] = {
                name: {"first": first.get(name), "now": identity.get(name)}
                for name in sorted({*first, *identity})
                if plain(first.get(name)) != plain(identity.get(name))
            }
        write_json(path, {**first, "attempts": [*past, head]})

    def sync(self) -> None:
        """Flush everything written so far to disk (fsync)."""
        for file in self._files.values():
            file.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            file.close()
