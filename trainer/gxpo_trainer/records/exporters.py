"""TensorBoard and W&B files from the rows of metrics.jsonl, during a run or after it.

Both write to the run's own folder and nothing is sent anywhere: W&B runs offline (`wandb sync` uploads
later, if a person wants that). Event files are written by TensorBoard's own writer, without torch.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gxpo_trainer.errors import ConfigError
from gxpo_trainer.jsonl import Row
from gxpo_trainer.records.reading import read_identity, read_metrics
from gxpo_trainer.records.reporter import Exporter

EXPORTERS = ("tensorboard", "wandb")


def make_exporters(
    names: str | Iterable[str], out_dir: Path, *, run_name: str = "run", config: Mapping[str, Any] | None = None
) -> list[Exporter]:
    """Exporters by name, e.g. "tensorboard,wandb"; an empty text gives none.

    Raises ConfigError for an unknown name and for one whose package is not installed, before anything is
    written. Pass the result to RunReporter, which gives them each row and closes them.
    """
    wanted = [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]
    wanted = list(dict.fromkeys(name for name in wanted if name))
    for name in wanted:
        if name not in EXPORTERS:
            raise ConfigError(f"--log {name}: unknown; choose from {', '.join(EXPORTERS)}")
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"--log {name}: the package {name!r} is not installed; pip install {name}, or leave it out"
            )
    made: list[Exporter] = []
    for name in wanted:
        if name == "tensorboard":
            made.append(TensorBoardExporter(out_dir / "tensorboard"))
        else:
            made.append(WandbExporter(out_dir, run_name=run_name, config=config or {}))
    return made


def export_run(out_dir: Path, names: str | Iterable[str]) -> int:
    """Export a finished or interrupted run from its own files; returns the number of rows."""
    config = read_identity(out_dir)["config"]
    exporters = make_exporters(names, out_dir, run_name=str(config["name"]), config=config)
    rows = read_metrics(out_dir)
    for exporter in exporters:
        for row in rows:
            exporter.write(row)
        exporter.close()
    return len(rows)


class TensorBoardExporter:
    """Scalars as TensorBoard event files, one file a process.

    Where a row does not follow the last one (the first row of a resumed run, a step that is repeated after
    a recovery) a session start is written first: TensorBoard then drops what it had from that step on.
    """

    name = "tensorboard"

    def __init__(self, log_dir: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]

        log_dir.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(log_dir))
        self._last_step: int | None = None
        self._attempt: int | None = None

    def write(self, row: Row) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        step, wall_time = int(row["step"]), float(row["time"])
        repeated = self._last_step is not None and step <= self._last_step and row["attempt"] != self._attempt
        if self._last_step is None or repeated:
            restart = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=wall_time, step=step, session_log=restart))
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in row["metrics"].items()]
        self._writer.add_event(Event(wall_time=wall_time, step=step, summary=Summary(value=values)))
        self._writer.flush()
        self._last_step, self._attempt = step, row["attempt"]

    def close(self) -> None:
        self._writer.close()


class WandbExporter:
    """An offline W&B run under `<out_dir>/wandb`, one an attempt: W&B takes no step twice.

    The attempts of a run share a group. Starts with the first row, so that a run that never trains leaves
    nothing behind.
    """

    name = "wandb"

    def __init__(self, out_dir: Path, *, run_name: str, config: Mapping[str, Any]) -> None:
        self._out_dir = out_dir
        self._run_name = run_name
        self._config = dict(config)
        self._run: Any = None
        self._attempt: int | None = None

    def write(self, row: Row) -> None:
        if self._run is None or row["attempt"] != self._attempt:
            self.close()
            self._start(int(row["attempt"]))
        self._run.log(dict(row["metrics"]), step=int(row["step"]))

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _start(self, attempt: int) -> None:
        # Set before the import: W&B reads its mode, and whether to report its own errors home, from there.
        os.environ["WANDB_MODE"] = "offline"
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        os.environ["WANDB_SILENT"] = "true"
        import wandb

        self._attempt = attempt
        self._run = wandb.init(
            mode="offline",
            dir=str(self._out_dir),
            project="gxpo",
            group=self._run_name,
            name=self._run_name if attempt == 1 else f"{self._run_name} (attempt {attempt})",
            config=self._config,
            reinit="create_new",
            settings=wandb.Settings(
                disable_git=True,
                save_code=False,
                console="off",
                x_disable_stats=True,
                x_disable_meta=True,
                silent=True,
            ),
        )
