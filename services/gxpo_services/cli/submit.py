"""`gxpo submit` and `gxpo sweep`: settings are validated locally first, then by the service."""

from __future__ import annotations

import argparse
import tomllib
from typing import Any

import tomli_w

from gxpo_client.client import Client, Json, is_loopback
from gxpo_client.errors import InvalidRequest
from gxpo_client.formats import number_of
from gxpo_services.cli.common import confirm, one_line, output
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.engines import STARTER_POLICIES
from gxpo_trainer.config.io import load_preset, load_run, parse_override, to_toml, toml_value
from gxpo_trainer.config.tasks import EMBEDDED_TASKS
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.jsonl import local_path, plain
from gxpo_trainer.studies.definition import check_arms, largest_cost, load_study

_PATHS = (
    "model.path",
    "teacher.path",
    "data.source",
    "data.sources.path",
    "warm_start.data.source",
    "warm_start.data.sources.path",
    "evaluation.benchmarks",
    "evaluation.data_root",
)
_WORDS = {*EMBEDDED_TASKS, *STARTER_POLICIES}


def submit(args: argparse.Namespace, client: Client) -> int:
    config = load_preset(args.preset, args.set) if args.preset else load_run(args.config, args.set)
    body = run_body(config, client) | _about(args) | {"group": args.group}
    if args.check:
        return _check(args, client, body)
    run = client.submit(body, args.key)
    output(args, run, run["id"], f"{one_line(run['name'])} is {run['state']}; `gxpo watch {run['id']}` follows it")
    if args.watch:
        from gxpo_services.cli.watch import watch

        args.runs, args.group = [run["id"]], None
        return watch(args, client)
    return 0


def run_body(config: RunConfig, client: Client) -> Json:
    """A request for one run. The config is sent as TOML, which represents infinities and missing values.

    Relative paths of existing files become absolute for a local service, which has another working directory.
    """
    body: Any = config.model_dump()
    for path in _PATHS if is_loopback(client.url) else ():
        body = _absolute(body, path.split("."))
    return {"toml": to_toml(RunConfig.model_validate(body)), "name": config.name}


def _about(args: argparse.Namespace) -> Json:
    name = {"name": args.name} if args.name else {}
    return name | {"tags": args.tags, "notes": args.notes, "priority": args.priority}


def _absolute(value: Any, names: list[str]) -> Any:
    """A part of a config, in which the paths below `names` are absolute."""
    if isinstance(value, list | tuple):
        return [_absolute(item, names) for item in value]
    if isinstance(value, dict):
        return {name: _absolute(item, names[1:]) if [name] == names[:1] else item for name, item in value.items()}
    if isinstance(value, str) and value and value not in _WORDS and local_path(value).exists():
        return str(local_path(value).resolve())
    return value


def absolute_overrides(overrides: list[str], client: Client) -> list[str]:
    """Overrides `a.b=c`, in which paths are absolute as in `run_body`."""
    parsed = [(text, *parse_override(text)) for text in overrides]
    changed = [(text, name, value, _absolute_setting(name, value, client)) for text, name, value in parsed]
    return [text if new == value else f"{name}={toml_value(new)}" for text, name, value, new in changed]


def _absolute_setting(name: str, value: Any, client: Client) -> Any:
    """A setting's value or values, in which paths are absolute as in `run_body`."""
    for path in _PATHS if is_loopback(client.url) else ():
        if f"{path}.".startswith(f"{name}."):
            value = _absolute(value, path.split(".")[name.count(".") + 1 :])
    return value


def _check(args: argparse.Namespace, client: Client, body: Json) -> int:
    check = client.post("/runs/validate", body=body)
    if not check["valid"] and not args.json:
        raise _invalid("config", check)
    lines = [f"valid; {cost_words(check['cost'])}"] if check["valid"] else []
    if (check.get("plan") or {}).get("advice"):
        lines.append(f"does not fit on {check['plan']['device']}: {one_line(check['plan']['advice'])}")
    for run in check["equal_runs"]:
        lines.append(f"a run with the same config exists: {run['id']} {one_line(run['name'])} ({run['state']})")
    output(args, check, "\n".join(lines))
    return 0 if check["valid"] else 2


def cost_words(cost: Json) -> str:
    """`30 steps, at most 90 backward passes (…)`."""
    steps = f"{number_of(cost['steps'], 'step')}, " if cost.get("steps") is not None else ""
    passes = cost.get("backward_passes")
    known = f"at most {number_of(passes, 'backward pass')}" if passes is not None else "backward passes unknown"
    return f"{steps}{known}" + (f" ({one_line(cost['per_step_words'])})" if cost.get("per_step_words") else "")


def sweep(args: argparse.Namespace, client: Client) -> None:
    if sum(source is not None for source in (args.config, args.preset, args.study)) != 1:
        raise ConfigError("name a run file, a preset with --preset, or a study with --study")
    if args.study is not None:
        _study(args, client)
        return
    config = load_preset(args.preset, args.set) if args.preset else load_run(args.config, args.set)
    body = run_body(config, client) | _about(args) | {"control": args.control, "preset": args.predefined}
    grid = {name: _absolute_setting(name, values, client) for name, values in map(_grid_axis, args.grid)}
    body |= {"base": {"toml": body.pop("toml")}, "grid": grid, "seeds": args.seeds}
    plan = client.post("/sweeps/validate", body=body)
    if not plan["valid"]:
        raise _invalid("sweep", plan)
    if not args.json:
        print(f"{number_of(len(plan['runs']), 'run')}: {cost_words(plan['cost'])}")
    elif args.check:
        output(args, plan)
    if args.check:
        return
    confirm(f"Submit {number_of(len(plan['runs']), 'run')}?", args.yes, "submitted")
    submitted = client.submit(body, to="/sweeps")
    group = submitted["group"]["id"]
    output(args, submitted, group, f"group {group} is queued; `gxpo watch --group {group}` follows it")


def _study(args: argparse.Namespace, client: Client) -> None:
    others = ("name", "set", "grid", "seeds", "predefined", "control")
    if given := [f"--{name}" for name in others if getattr(args, name)]:
        raise ConfigError(f"the study file determines all runs; remove {', '.join(given)}")
    study = load_study(args.study)
    check_arms(study)
    runs, passes = largest_cost(study)
    if not args.json:
        arms, most = number_of(len(study.arms), "arm"), number_of(runs, "run")
        print(f"{study.title}: {arms}, at most {most} and {number_of(passes, 'backward pass')}")
    elif args.check:
        output(args, {"runs": runs, "backward_passes": passes})
    if args.check:
        return
    confirm(f"Submit study {study.name}?", args.yes, "submitted")
    body: Any = study.model_dump(exclude_none=True)
    for part in (body, *body["arms"].values()):
        part["overrides"] = absolute_overrides(part["overrides"], client)
    about = {"tags": args.tags, "notes": args.notes, "priority": args.priority}
    submitted = client.submit({"toml": tomli_w.dumps(body)} | about, to="/studies")
    group, queued = submitted["group"], number_of(submitted["group"]["num_runs"], "run")
    output(args, submitted, group["id"], f"{queued} queued; the others follow as these end")


def _grid_axis(text: str) -> tuple[str, list[Any]]:
    """`learner.rule.k=3,5,10` as a setting and its values."""
    path, equals, words = text.partition("=")
    if not equals or not path.strip() or not words.strip():
        raise ConfigError(f"--grid {text}: must look like learner.rule.k=3,5,10")
    values: list[Any] = []
    for word in words.split(","):
        try:
            values.append(plain(tomllib.loads(f"value = {word.strip()}")["value"]))
        except tomllib.TOMLDecodeError:
            values.append(word.strip())
    return path.strip(), values


def _invalid(what: str, check: Json) -> InvalidRequest:
    lines = [f"  {item['field']}: {item['message']}" for item in check["errors"]]
    return InvalidRequest("\n".join([f"invalid {what}:", *lines]))
