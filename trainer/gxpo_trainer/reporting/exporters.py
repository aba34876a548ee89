"""TensorBoard and W&B export of a run's metric rows, and custom loggers.

Both write to the run's folder and send nothing: W&B runs offline, and `wandb sync` uploads later. Event files are
written with TensorBoard's own writer, without torch.

A custom logger is a class on the contract `reporter.Exporter`, which is created as
`Class(out_dir, run_name=…, config=…)`, with its settings as first argument where it has a settings class
(gxpo_trainer.config.LoggerSettings).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gxpo_trainer import plugins
from gxpo_trainer.config.io import parse_override
from gxpo_trainer.config.messages import BadSettings, config_error
from gxpo_trainer.config.run import LOGGER_CHOICE
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.jsonl import Row
from gxpo_trainer.reporting.reporter import Exporter


def make_exporters(
    names: str | Iterable[str],
    out_dir: Path,
    *,
    run_name: str = "run",
    config: Mapping[str, Any] | None = None,
    options: Sequence[str] = (),
) -> list[Exporter]:
    """Exporters by name, e.g. "tensorboard,wandb", for a RunReporter. options: `NAME.SETTING=VALUE`.

    Raises ConfigError for an unknown name, a missing package or an invalid setting, before a file is made.
    """
    listed = names.split(",") if isinstance(names, str) else names
    selected = list(dict.fromkeys(name.strip() for name in listed if name.strip()))
    given: dict[str, dict[str, Any]] = {name: {} for name in selected}
    for option in options:
        path, value = parse_override(option)
        name, _, setting = path.rpartition(".")
        if name not in given:
            raise ConfigError(f"--log-set {option}: no logger {name!r} is chosen; add --log {name}")
        given[name][setting] = value
    makers = [_maker(name, given[name]) for name in selected]
    return [make(out_dir, run_name=run_name, config=config or {}) for make in makers]


def _maker(name: str, given: Mapping[str, Any]) -> Callable[..., Exporter]:
    """What creates the exporter with this name. given: its settings. Raises ConfigError."""
    if name in LOGGER_CHOICE.built_in:
        if given:
            raise ConfigError(f"--log-set {name}.{next(iter(given))}: {name} has no settings; remove it")
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"--log {name}: the package {name!r} is not installed; pip install {name}, or leave it out"
            )
        return TensorBoardExporter if name == "tensorboard" else WandbExporter
    try:
        if (settings := LOGGER_CHOICE.settings_class(name)) is not None:
            try:
                own = settings.model_validate(given)
            except ValidationError as error:
                raise config_error(error, f"--log-set {name}", root=settings) from None
            return partial(plugins.implementation(own), own)
        maker: Callable[..., Exporter] = plugins.load("loggers", name)
    except BadSettings:
        raise
    except ConfigError as error:
        raise ConfigError(f"--log {name}: {error}") from None
    if given:
        raise ConfigError(f"--log-set {name}.{next(iter(given))}: {name} has no settings class; remove it")
    return maker


class TensorBoardExporter:
    """Scalars as TensorBoard event files, one file per process.

    Before a row that does not follow the previous one (first row of a resumed run, repeated step after a recovery) a
    session start is written, which makes TensorBoard discard earlier data from that step on.
    """

    name = "tensorboard"

    def __init__(self, out_dir: Path, *, run_name: str, config: Mapping[str, Any]) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]

        log_dir = out_dir / "tensorboard"
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
    """Offline W&B runs under `<out_dir>/wandb`, one per attempt, because W&B accepts each step once.

    The attempts of a run share a group. A W&B run is created with the first row.
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
        # W&B reads its mode and whether to send crash reports at import.
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
