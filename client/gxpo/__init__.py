"""Train and compare from Python, for notebooks and scripts.

    import gxpo

    trainer = gxpo.Trainer("my-model", data="problems.jsonl", rewards=[my_function], rule=gxpo.rules.GXPO(k=5))
    run = trainer.train(steps=100)
    run.metrics()["reward/mean"].plot()

`Trainer` is `gxpo train` on this machine, without a service: the same settings, checks, run folder, metrics and
checkpoints. `Client` submits to a service, waits, and reads its results. Tables are pandas DataFrames.

Imports torch and engines when a run starts.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import io
import json
import os
import re
import symtable
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pandas
from pandas import DataFrame

from gxpo import rules
from gxpo_client.client import Json, parameters
from gxpo_services.cli.common import connect
from gxpo_services.cli.submit import run_body
from gxpo_services.run_states import TERMINAL
from gxpo_trainer import __version__
from gxpo_trainer.cli import safe_name
from gxpo_trainer.config import RuleSettings, RunConfig
from gxpo_trainer.config.io import build, check_implementations, load_preset, load_run
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.grading.rewards import RewardInput
from gxpo_trainer.reporting.reading import read_evaluations, read_metrics, read_samples

__all__ = ["Client", "ConfigError", "RewardInput", "Run", "RunConfig", "Trainer", "__version__", "rules"]

Component = str | Callable[[RewardInput], float] | Mapping[str, Any]
"""A reward: its name, a function, or its settings, in which `name` may be a function."""


class Trainer:
    """A run on this machine.

    model: folder, hub name, `starter`. data: file of problems, folder, hub name, or rows: dicts or a DataFrame; None:
    the embedded word problems. rewards: one or several components of the reward; none: correctness. rule: settings or
    name; None: GXPO. out_dir: folder of the run, by default runs/<name>. settings: any other settings of a run file by
    their paths, such as {"rollout.max_new_tokens": 200}.

    Rows are stored in the run's folder as a file. A function of a module is imported by the verifier's processes. One
    that a notebook or script defines is stored as source text, with the imports, constants and functions of modules
    that it uses.

    Raises ConfigError with every invalid setting.
    """

    def __init__(
        self,
        model: str | Path = "starter",
        *,
        data: str | Path | DataFrame | Iterable[Mapping[str, Any]] | None = None,
        rewards: Component | Sequence[Component] = (),
        rule: RuleSettings | str | None = None,
        name: str = "run",
        out_dir: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(model, str | Path):
            raise ConfigError(f"model is a {type(model).__name__}; save it with save_pretrained, and give its folder")
        self.out_dir = Path(out_dir) if out_dir is not None else Path("runs") / safe_name(name)
        several = [rewards] if isinstance(rewards, str | Mapping) or callable(rewards) else rewards
        components = [dict(each) if isinstance(each, Mapping) else {"name": each} for each in several]
        functions = [each["name"] for each in components if callable(each.get("name"))]
        local = [function for function in functions if getattr(function, "__module__", "") == "__main__"]
        self._stored: dict[str, str] = {}
        module = ""
        if local:
            source = "\n\n".join([_FUTURE, *map(_source_of, local)]) + "\n"
            module = self._keep("rewards_", source, ".py").stem
        for each in components:
            if isinstance(function := each.get("name"), FunctionType):
                each["name"] = f"{module if function in local else function.__module__}:{function.__qualname__}"
        if data is not None and not isinstance(data, str | Path):
            data = self._keep("rows_", _rows(data), ".jsonl")
        given = {
            "name": name,
            "model.path": str(model),
            "data.source": data and str(data),
            "verifier.rewards": components or None,
            "learner.rule": rule.model_dump() if isinstance(rule, RuleSettings) else rule and {"name": rule},
        }
        self._settings: dict[str, Any] = {}
        for path, value in ({key: value for key, value in given.items() if value} | dict(settings or {})).items():
            *sections, key = path.split(".")
            section = self._settings
            for part in sections:
                if not isinstance(section.get(part), dict):
                    section[part] = {}  # which `build` refuses where there is no section
                section = section[part]
            section[key] = _merged(section.get(key), value)
        self.config: RunConfig = build(self._settings, source="gxpo.Trainer")

    def train(self, steps: int | None = None, *, resume: bool = False) -> Run:
        """Train until the budget is reached; the finished run. resume: go on from its last checkpoint.

        steps: budget.steps, beside the bounds of `settings`. Raises ConfigError, DataError or CheckpointError before
        anything starts; TrainingError later.
        """
        from gxpo_trainer.training.run import train_run

        config = build(self._settings, [f"budget.steps={steps}"] if steps is not None else [], source="gxpo.Trainer")
        with self._importable():
            check_implementations(config, "gxpo.Trainer")
            return Run(self.out_dir, train_run(config, self.out_dir, resume=resume))

    def _keep(self, prefix: str, text: str, suffix: str) -> Path:
        """The file that `store` writes this text to. Its name says what is in it, so that equal text is an equal
        config."""
        name = f"{prefix}{hashlib.sha256(text.encode()).hexdigest()[:8]}{suffix}"
        self._stored[name] = text
        return self.out_dir / name

    def store(self) -> None:
        """Write the functions and rows that were given as objects to the run's folder."""
        for name, text in self._stored.items():
            self.out_dir.mkdir(parents=True, exist_ok=True)
            (self.out_dir / name).write_text(text, encoding="utf-8")

    @contextmanager
    def _importable(self) -> Iterator[None]:
        """Let the processes of the run import what this process can, and the functions defined here."""
        self.store()
        earlier = os.environ.get("PYTHONPATH", "")
        here = [str(self.out_dir.resolve()), *(entry or str(Path.cwd()) for entry in sys.path)]
        os.environ["PYTHONPATH"] = os.pathsep.join(here)
        sys.path.insert(0, here[0])
        try:
            yield
        finally:
            sys.path.remove(here[0])
            os.environ["PYTHONPATH"] = earlier


def _rows(data: Any) -> str:
    """Rows as JSON lines. Raises ConfigError."""
    if isinstance(data, DataFrame):
        data = data.astype(object).where(data.notna(), None).to_dict("records")
    if not isinstance(data, Iterable):
        raise ConfigError(f"data is of the type {type(data).__name__}; give a file, a hub name, or rows as dicts")
    lines = []
    for number, row in enumerate(data):
        if not isinstance(row, Mapping):
            raise ConfigError(f"data: row {number} is of the type {type(row).__name__}; rows are dicts of fields")
        try:
            lines.append(json.dumps(dict(row), ensure_ascii=False, allow_nan=False).encode().decode())
        except (TypeError, ValueError) as error:
            raise ConfigError(f"data: row {number} cannot be written as JSON: {error}") from None
    if not lines:
        raise ConfigError("data has no rows")
    return "\n".join(lines) + "\n"


def _merged(given: Any, value: Any) -> Any:
    """A value, or a section with the settings that were given for it before."""
    if not isinstance(value, Mapping):
        return value
    settings = dict(given) if isinstance(given, dict) else {}
    return settings | {key: _merged(settings.get(key), own) for key, own in value.items()}


@dataclass(frozen=True, slots=True)
class Run:
    """The folder of a run, of this process or of an earlier `gxpo train`. ended: the bound that ended it.

    Raises ConfigError when there is no such folder.
    """

    folder: str | Path
    ended: str | None = None

    def __post_init__(self) -> None:
        if not Path(self.folder).is_dir():
            raise ConfigError(f"there is no run folder {str(self.folder)!r}; check the path")

    def metrics(self) -> DataFrame:
        """A row for each step, a column for each metric."""
        rows = read_metrics(Path(self.folder))
        steps = pandas.Index([row["step"] for row in rows], name="step")
        return DataFrame([row["metrics"] for row in rows], index=steps)

    def evaluations(self) -> DataFrame:
        """A row for each step and benchmark, a column for each score."""
        rows = [
            {"step": r["step"], "benchmark": r["benchmark"], **r["scores"]} for r in read_evaluations(Path(self.folder))
        ]
        return DataFrame(rows, columns=None if rows else ["step", "benchmark"]).set_index(["step", "benchmark"])

    def samples(self) -> DataFrame:
        """A row for each recorded response."""
        return DataFrame(read_samples(Path(self.folder)))


class Client:
    """Runs of a service. `api` is the client of all its other calls.

    url: by default GXPO_URL, or the service of `gxpo up` in ./gxpo-home. token_file: by default GXPO_TOKEN, or the
    home's token. Calls raise the errors of gxpo_client.errors; those that change nothing wait a minute for a service
    that does not respond.
    """

    def __init__(self, url: str | None = None, *, token_file: str | Path | None = None) -> None:
        self.api = connect(url, Path(token_file) if token_file is not None else None, patience_s=60.0)

    def submit(self, run: str | Path | RunConfig | Trainer, overrides: Sequence[str] = (), **about: Any) -> str:
        """Submit a run; its id. run: a preset's name, a run file, a config, or the config of a Trainer.

        overrides: `learner.rule.k=5`, as of --set. about: name, tags, notes, priority, group.
        """
        if isinstance(run, Trainer):
            run.store()
        config: str | Path | RunConfig = run.config if isinstance(run, Trainer) else run
        if isinstance(config, RunConfig):
            config = build(config.model_dump(), overrides)
        elif Path(config).suffix in (".toml", ".json"):
            config = load_run(Path(config), overrides)
        else:
            config = load_preset(str(config), overrides)
        return str(self.api.submit(run_body(config, self.api) | about)["id"])

    def wait(self, runs: str | Sequence[str], timeout_s: float | None = None) -> dict[str, str]:
        """Wait until the runs have ended; their states. Raises TimeoutError."""
        waiting = _ids(runs)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            states = {run: str(self.api.run(run)["state"]) for run in waiting}
            if TERMINAL.issuperset(states.values()):
                return states
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"not ended after {timeout_s:g} s: {states}")
            time.sleep(1.0)

    def metrics(self, runs: str | Sequence[str]) -> DataFrame:
        """A row for each run and step, a column for each metric."""
        return self._export("metrics", runs).pivot(index=["run", "step"], columns="metric", values="value")

    def evaluations(self, runs: str | Sequence[str]) -> DataFrame:
        """A row for each run, step and benchmark, a column for each score."""
        index = ["run", "step", "benchmark"]
        return self._export("evaluations", runs).pivot(index=index, columns="metric", values="value")

    def compare(self, runs: str | Sequence[str], **options: Any) -> Json:
        """The comparison: `evidence` says what the runs support, `missing` what a conclusion lacks, `groups` the rest.

        options: baseline, metric, benchmark, x, as of `gxpo compare`.
        """
        return self.api.get("/compare", runs=_ids(runs), **options)

    def _export(self, part: str, runs: str | Sequence[str]) -> DataFrame:
        query = parameters({"runs": _ids(runs), "format": "csv", "parts": part})
        return pandas.read_csv(io.BytesIO(self.api.request("GET", "/export", params=query, retry=True).content))


def _ids(runs: str | Sequence[str]) -> list[str]:
    """The ids of one run or of several."""
    return [runs] if isinstance(runs, str) else list(runs)


_FUTURE = "from __future__ import annotations"
"""Annotations stay text: the names in them need no definition."""


def _source_of(function: Any) -> str:
    """Source text of a function and of the names that it uses. Raises ConfigError for one that text cannot hold."""
    own, name = inspect.unwrap(function), str(getattr(function, "__qualname__", function))
    source = ""
    if isinstance(own, FunctionType) and name.isidentifier():
        with suppress(OSError):  # typed into an interpreter
            source = textwrap.dedent(inspect.getsource(own)).rstrip()
    if not source:
        raise ConfigError(f"reward {name}: define it with def at the top of a cell or of a module")
    used = _global_names(symtable.symtable(f"{_FUTURE}\n{source}", name, "exec")) & own.__globals__.keys() - {name}
    return "\n".join([*(_definition(name, each, own.__globals__[each]) for each in sorted(used)), source])


def _definition(function: str, name: str, value: Any) -> str:
    """The line that gives `name` this value in another module."""
    with suppress(ValueError, SyntaxError):
        if ast.literal_eval(repr(value)) == value:
            return f"{name} = {value!r}"
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    if isinstance(value, re.Pattern):
        return f"import re\n{name} = re.compile({value.pattern!r}, {value.flags})"
    module, own = str(getattr(value, "__module__", "")), str(getattr(value, "__name__", ""))
    if module != "__main__" and getattr(sys.modules.get(module), own, None) is value:
        return f"from {module} import {own} as {name}"
    raise ConfigError(
        f"reward {function} uses {name}, which other processes do not have; define it inside the function, or write "
        "both to a module and import the function from there"
    )


def _global_names(block: symtable.SymbolTable) -> set[str]:
    """Names that a definition looks up in its module: in its body, the functions inside, defaults and decorators."""
    names = {symbol.get_name() for symbol in block.get_symbols() if symbol.is_global() and symbol.is_referenced()}
    return names.union(*map(_global_names, block.get_children()))
