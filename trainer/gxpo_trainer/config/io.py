"""RunConfig in and out: TOML and JSON files, presets, `--set a.b=c` overrides.

TOML has no null: the word `"none"` replaces it wherever a setting is optional.

Presets are the files of `presets/`, and what `preset_texts` derives from them. A preset may start from another with
`extends = "name"`; run files may not, so that each is complete.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import re
import tomllib
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from gxpo_trainer import plugins
from gxpo_trainer.config.components import CHOICES
from gxpo_trainer.config.messages import config_error, nearest_setting, setting_paths
from gxpo_trainer.config.rules import RULES
from gxpo_trainer.config.run import RunConfig
from gxpo_trainer.errors import ConfigError


def load_run(path: Path | str, overrides: Sequence[str] = (), *, runs_here: bool = False) -> RunConfig:
    """The config of a .toml or .json file with `a.b=c` overrides applied.

    Raises ConfigError with every invalid setting when the file cannot be read, parsed or used. runs_here: also when the
    implementation of a custom component cannot be imported, or a tracker's package is not installed.
    """
    settings = read_settings(Path(path))
    if "arms" in settings:
        raise ConfigError(f"{path} is a study, not a run; `gxpo study run {path}` executes it")
    config = build(settings, overrides, source=str(path))
    if runs_here:
        check_implementations(config, str(path))
    return config


def check_implementations(config: RunConfig, source: str) -> None:
    """Raises ConfigError for a custom component that cannot be imported or lacks a method of its contract, or a tracker
    whose package is not installed.

    source: of the config.
    """
    problems = []
    for choice in CHOICES.values():
        value = functools.reduce(getattr, choice.section.split("."), config)
        for number, part in enumerate(value if isinstance(value, tuple) else [value]):
            name = getattr(part, choice.key)
            try:
                if name not in choice.built_in:
                    settings = hasattr(part, "implementation")
                    component = plugins.implementation(part) if settings else plugins.load(choice.kind, name)
                    if problem := plugins.class_problem(choice.kind, component, has_settings=settings):
                        raise ConfigError(f"cannot be used: {problem}")
                elif choice.kind == "loggers" and importlib.util.find_spec(name) is None:
                    package = {"mlflow": "mlflow-skinny"}.get(name, name)
                    fix = f"pip install {package}, or remove the tracker"
                    raise ConfigError(f"the package {package} is not installed; {fix}")
            except ConfigError as error:
                place = f"{choice.section}[{number}]" if isinstance(value, tuple) else choice.section
                problems.append(f'  {place}.{choice.key} = "{name}": {error}')
    if problems:
        raise ConfigError("\n".join([f"{source} cannot be used:", *problems]))


def load_preset(name: str, overrides: Sequence[str] = ()) -> RunConfig:
    """A preset by name with overrides applied. Raises ConfigError, with the list, when there is none of this name."""
    settings: dict[str, Any] = {}
    base: str | None = name
    while base is not None:
        if base not in preset_names():
            raise ConfigError(f"there is no preset {base!r}; choose one of {', '.join(preset_names())}")
        own = tomllib.loads(preset_texts()[base])
        base = own.pop("extends", None)
        settings = _merge(own, settings)
    return build(settings, overrides, source=f"preset {name}")


def preset_names() -> list[str]:
    """Names that `load_preset` takes, in alphabetical order."""
    return sorted(preset_texts())


_FIRST_OF_PAPER = "paper-1.5b"


@functools.cache
def preset_texts() -> dict[str, str]:
    """TOML of each preset by name. The paper's other models have the baseline, SFPO and control of its first one."""
    files = (resources.files("gxpo_trainer.config") / "presets").iterdir()
    texts = {f.name.removesuffix(".toml"): f.read_text(encoding="utf-8") for f in files if f.name.endswith(".toml")}
    siblings = [name for name in texts if name.startswith(f"{_FIRST_OF_PAPER}-")]
    for base in [name for name in texts if name.startswith("paper-") and not name.startswith(_FIRST_OF_PAPER)]:
        texts |= {name.replace(_FIRST_OF_PAPER, base): texts[name].replace(_FIRST_OF_PAPER, base) for name in siblings}
    return texts


def build(settings: dict[str, Any], overrides: Sequence[str] = (), *, source: str = "the config") -> RunConfig:
    """RunConfig from nested plain values; ConfigError lists every invalid setting, one line each."""
    settings = apply_overrides(settings, overrides)
    try:
        return RunConfig.model_validate(settings)
    except ValidationError as error:
        raise config_error(error, source) from None


def read_settings(path: Path, fix: str = "`gxpo config --preset demo > {name}` creates one") -> dict[str, Any]:
    """The nested values of a .toml or .json file, not yet checked. fix: for a file that does not exist."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; {fix.format(name=path.name)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; name a .toml or .json file in it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    try:
        if path.suffix == ".json":
            settings = json.loads(text)
        elif path.suffix == ".toml":
            settings = tomllib.loads(text)
        else:
            raise ConfigError(f"{path} has the suffix {path.suffix!r}; a config is a .toml or a .json file")
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} contains a {type(settings).__name__}; a config is an object of settings")
    return settings


def apply_overrides(settings: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `settings` with each `a.b=c` applied; a missing section starts from its defaults.

    Naming another rule (`learner.rule.name=sfpo`) starts from that rule's defaults, whatever the order, because
    the settings of one rule do not apply to another. The same holds for losses, advantages and environments, but for
    the settings that all of them have and that are not at their default.
    """
    result = copy.deepcopy(settings)
    parsed = [(text, *parse_override(text)) for text in overrides]
    choices = {f"{choice.section}.{choice.key}": choice for choice in CHOICES.values()}
    for text, path, value in parsed:
        _refuse_part_of_list(text, path)
        if choice := choices.get(path):
            section = _section(result, path)
            if section.get(choice.key) != value:
                shared = choice.base.model_fields
                for name in [name for name in section if name not in shared or section[name] == shared[name].default]:
                    del section[name]
            section[choice.key] = value
    unknown = _load_named(result)
    for text, path, value in parsed:
        if path not in setting_paths():
            for place, error in unknown.items():
                if path.startswith(f"{place}."):
                    raise ConfigError(f"--set {text}: the settings of {place} are not known: it {error}")
            near = nearest_setting(path)
            fix = f"did you mean {near}?" if near else "`gxpo config --schema` lists all settings"
            raise ConfigError(f"--set {text}: {path} is not a setting; {fix}")
        if path not in choices:
            _section(result, path)[path.rpartition(".")[2]] = value
    return result


def _refuse_part_of_list(text: str, path: str) -> None:
    """Raises ConfigError for a setting of an entry of a list, such as `verifier.rewards.weight`."""
    value: Any = RunConfig().model_dump()
    keys = re.split(r"[.[]", path)
    for number, key in enumerate(keys):
        if isinstance(value, tuple):
            whole = ".".join(keys[:number])
            raise ConfigError(f"--set {text}: {whole} is a list and is set as a whole, in brackets")
        value = value.get(key) if isinstance(value, dict) else None


def _section(settings: dict[str, Any], path: str) -> dict[str, Any]:
    """The section of `settings` that holds the setting at `path`; one that is missing is added with its defaults, but
    without the benchmarks, which follow from the data, and empty in a section of another choice than the default."""
    section: dict[str, Any] = settings
    default: Any = RunConfig().model_dump(exclude={"evaluation": {"benchmarks"}})
    chosen_by = {choice.section: choice.key for choice in CHOICES.values()}
    sections = path.split(".")[:-1]
    for number, key in enumerate(sections, start=1):
        default = default.get(key) if isinstance(default, dict) else None
        if not isinstance(section.get(key), dict):
            section[key] = copy.deepcopy(default) if isinstance(default, dict) else {}
        section = section[key]
        name = chosen_by.get(".".join(sections[:number]))
        if name in section and isinstance(default, dict) and section[name] != default.get(name):
            default = None
    return section


def _load_named(settings: dict[str, Any]) -> dict[str, ConfigError]:
    """Load the settings classes that `settings` name as `module:Class`, so that their settings are known.

    Returns why those of a section are not; the validation of the config refuses it.
    """
    unknown: dict[str, ConfigError] = {}
    for choice in CHOICES.values():
        value: Any = settings
        for key in choice.section.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        for part in value if isinstance(value, list | tuple) else [value]:
            name = part.get(choice.key) if isinstance(part, dict) else part
            if isinstance(name, str) and plugins.is_class_path(name):
                try:
                    choice.settings_class(name)
                except ConfigError as error:
                    unknown[choice.section] = error
    return unknown


def parse_override(text: str) -> tuple[str, Any]:
    """Dotted path and value of `a.b=c`; one that is no TOML is a text. Raises ConfigError."""
    path, equals, word = text.partition("=")
    path, word = path.strip(), word.strip()
    if not equals or not path:
        raise ConfigError(f"--set {text}: must look like learner.rule.k=5")
    try:
        parsed = tomllib.loads(f"value = {word}")
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        if word.startswith(("[", "{")):
            raise ConfigError(f"--set {text}: the value is not valid TOML ({error}); put texts in quotes") from None
        return path, word
    value = parsed.get("value")
    usable = len(parsed) == 1 and isinstance(value, bool | int | float | str | list | dict)
    return path, value if usable else word


def toml_value(value: Any) -> str:
    """A value as `parse_override` reads it, on one line: tables that do not fit on one would become sections."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml_value(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return tomli_w.dumps({"value": value}).partition(" = ")[2].strip()


def to_toml(config: RunConfig, comments: Iterable[str] = ()) -> str:
    """TOML that `load_run` reads back to an equal config; `comments` come first, one line each."""
    header = "".join(f"# {line}".rstrip() + "\n" for line in comments)
    return header + ("\n" if header else "") + tomli_w.dumps(_without_none(config))


def _without_none(part: BaseModel) -> dict[str, Any]:
    """Plain values of `part`; None is omitted where it is the default, otherwise the word "none"."""
    result: dict[str, Any] = {}
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        if isinstance(value, BaseModel):
            result[name] = _without_none(value)
        elif isinstance(value, tuple):
            result[name] = [_without_none(item) if isinstance(item, BaseModel) else item for item in value]
        elif value is not None or field.default is not None:
            result[name] = "none" if value is None else value
    return result


def learning_rate_control(config: RunConfig) -> RunConfig:
    """The baseline at a multiple of the learning rate: the control of a run with look-ahead, × (αK + 1) for GXPO.

    A look-ahead in a flat region moves αK + 1 plain steps along one direction, so a gain over the baseline counts
    only if this longer step does not show it too.
    """
    factor = config.learner.rule.learning_rate_factor
    assert factor is not None, "the rule has no look-ahead to control for"
    baseline = next(rule for rule in RULES if rule.family == "baseline").model_validate({})
    rate = config.learner.optimizer.learning_rate * factor
    optimizer = config.learner.optimizer.model_copy(update={"learning_rate": rate})
    learner = config.learner.model_copy(update={"rule": baseline, "optimizer": optimizer})
    return config.model_copy(update={"learner": learner})


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`changes` over `base`, section by section; a section that names another rule replaces it whole."""
    result = base | changes
    for key, value in changes.items():
        old = base.get(key)
        if isinstance(value, dict) and isinstance(old, dict) and value.get("name", old.get("name")) == old.get("name"):
            result[key] = _merge(old, value)
    return result
