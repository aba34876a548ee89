"""Loads custom components: an update rule, a loss, an advantage, a reward, an environment or a logger.

A custom component is a class of an installed package, which registers it under a name,

    [project.entry-points."gxpo.rules"]
    lookahead = "my_rules.lookahead:LookaheadRule"

or any class on the import path, which a run file names as `my_rules.lookahead:LookaheadRule`.

Naming a class runs its module, so a run file decides what is imported. On a user's own machine that is their consent.
Where run files of others are executed, the administrator lists the names that may be imported in environment
variables: GXPO_PLUGIN_ALLOWLIST for all kinds, and one each for rewards and environments. The service sets them for
itself and for its jobs. Entries are separated by commas; `*` is every registered name. Once a variable is set, what it
does not list is never imported.

Free of pydantic and torch, because worker processes must start quickly.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, get_args

from gxpo_trainer.errors import ConfigError

Kind = Literal["rules", "losses", "advantages", "rewards", "environments", "loggers"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ALLOWLIST = "GXPO_PLUGIN_ALLOWLIST"
ALLOWLIST_OF_KIND: Mapping[Kind, str] = {
    "rewards": "GXPO_REWARD_ALLOWLIST",
    "environments": "GXPO_ENVIRONMENT_ALLOWLIST",
}
METHODS: Mapping[Kind, Mapping[str, tuple[str, ...]]] = {
    "rules": {"__init__": (), "step": ("learner", "*", "last"), "state_dict": (), "load_state_dict": ("state",)},
    "losses": {"__init__": (), "__call__": ("log_ratio", "logprobs", "micro")},
    "advantages": {"__init__": ("loss",), "__call__": ("groups",)},
    "environments": {"__init__": (), "reset": ("problem", "seed"), "step": ("action",)},
    "loggers": {"__init__": ("out_dir", "*", "run_name", "config"), "write": ("row",), "close": ()},
}
"""What the class of each kind must have: methods and their arguments, after `*` those that are passed by name. One with
a settings class is constructed with the settings before these. A reward may be any object that can be called, and is
checked once it is created."""
ALL_REGISTERED = "*"
_LONGEST_TYPO = 200
"""Characters of a name that are compared: a long one must not occupy the service."""
_CLASS_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class Unavailable(ConfigError):
    """A class may not be imported here, or its module does not exist here; another machine may have it."""


def is_class_path(name: str) -> bool:
    """Whether a name has the form `package.module:Class`."""
    return _CLASS_PATH.fullmatch(name) is not None


def allowed(kind: Kind, environment: Mapping[str, str] = os.environ) -> frozenset[str] | None:
    """Names that the environment variables list; None where none of them is set, which allows all."""
    variables = [name for name in (ALLOWLIST, ALLOWLIST_OF_KIND.get(kind, "")) if name in environment]
    if not variables:
        return None
    return frozenset(name.strip() for variable in variables for name in environment[variable].split(",")) - {""}


def is_allowed(kind: Kind, name: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a component of this name may be imported."""
    listed = allowed(kind, environment)
    return listed is None or name in listed or (ALL_REGISTERED in listed and not is_class_path(name))


def check_allowed(kind: Kind, name: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raises Unavailable for a name that may not be imported. Imports nothing."""
    if not is_allowed(kind, name, environment):
        listed = ", ".join(sorted(allowed(kind, environment) or ())) or "empty"
        variable = ALLOWLIST_OF_KIND.get(kind, ALLOWLIST)
        raise Unavailable(
            f"is not allowed on this machine; its administrator can list it in the environment variable {variable} "
            f"(now {listed})"
        )


def check_address(setting: str, address: str, variable: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError for an address that is not listed, character by character, in this environment variable."""
    listed = [entry.strip() for entry in environment.get(variable, "").split(",") if entry.strip()]
    if address not in listed:
        raise ConfigError(
            f"{setting}: {address} is not an allowed address on this machine; its administrator can list it in the "
            f"environment variable {variable} (now {', '.join(listed) or 'empty'})"
        )


@functools.cache
def _registered() -> Mapping[str, Mapping[str, tuple[EntryPoint, ...]]]:
    """Entry points of all kinds by name. Packages installed later are not seen by this process."""
    groups: dict[str, dict[str, tuple[EntryPoint, ...]]] = {kind: {} for kind in KINDS}
    installed = entry_points()
    for kind, named in groups.items():
        for entry in installed.select(group=f"gxpo.{kind}"):
            same = named.get(entry.name, ())
            # A package may be on the import path twice, such as in a folder and as installed.
            if all(entry.value != other.value for other in same):
                named[entry.name] = (*same, entry)
    return groups


def registered_names(kind: Kind) -> list[str]:
    """Names that installed packages register and that may be imported."""
    return [name for name in _registered()[kind] if is_allowed(kind, name)]


def exists(kind: Kind, name: str) -> bool:
    """Whether an installed package registers this name, or it is a class path. Imports nothing."""
    return name in _registered()[kind] or is_class_path(name)


def check_unique(kind: Kind, name: str, built_in: Iterable[str]) -> None:
    """Raises ConfigError when more than one class has this name."""
    entries = _registered()[kind].get(name, ()) if is_allowed(kind, name) else ()
    owners = ["gxpo"] if name in built_in else []
    owners += [f"{entry.dist.name} ({entry.value})" if entry.dist else entry.value for entry in entries]
    if len(owners) > 1:
        raise ConfigError(
            f"is the name of several components (gxpo.{kind}), in {' and '.join(owners)}; uninstall one package, or "
            "rename its entry point"
        )


def load(kind: Kind, name: str, environment: Mapping[str, str] = os.environ) -> Any:
    """The class with this name: registered, or `module:Class`.

    Raises ConfigError, whose message starts with a verb, when it may not or cannot be imported.
    """
    entries = _registered()[kind].get(name, ())
    if not entries and not is_class_path(name):
        raise ConfigError(f"is not registered by an installed package (entry points gxpo.{kind})")
    check_allowed(kind, name, environment)
    return import_class(entries[0].value if entries else name)


def import_class(path: str) -> Any:
    """What `module:Class` refers to. Raises ConfigError, whose message starts with a verb."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # custom code may raise anything
        failure = f"cannot be imported ({type(error).__name__}: {error})"
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise Unavailable(f"{failure}; install its package, or add its folder to PYTHONPATH") from None
        place: Any = traceback.extract_tb(error.__traceback__)[-1]
        if isinstance(error, SyntaxError) and (error.filename or "").endswith(".py"):
            place = error  # its own traceback ends in Python's importer
        raise ConfigError(f"{failure}; fix {place.filename}, line {place.lineno}") from None
    if not hasattr(module, attribute):
        raise ConfigError(
            f"does not exist: module {module_name} has no {attribute}{suggestion(attribute, dir(module))}"
        )
    return getattr(module, attribute)


def class_problem(kind: Kind, candidate: Any, *, has_settings: bool) -> str | None:
    """Why an object cannot be used as the class of a component, with the fix; None when it can be."""
    if kind not in METHODS:
        return None
    if not inspect.isclass(candidate):
        return "it is not a class; name one as package.module:Class"
    for name, arguments in METHODS[kind].items():
        arguments = ("settings", *arguments) if name == "__init__" and has_settings else arguments
        fix = f"define {name}({', '.join(('self', *arguments))})"
        # Not by getattr, which would find methods of the metaclass.
        method = next((vars(part)[name] for part in candidate.__mro__ if name in vars(part)), None)
        if method is None:
            return f"it has no method {name}; {fix}"
        if inspect.iscoroutinefunction(method):
            return f"its method {name} is a coroutine; {fix} without async"
        passed = [argument for argument in arguments if argument != "*"]
        first = arguments.index("*") if "*" in arguments else len(passed)
        by_class = name == "__init__"  # constructed by the class, which may have __new__ instead
        bound = [] if by_class or isinstance(method, staticmethod) else ["self"]
        try:
            signature = inspect.signature(candidate if by_class else method)
            signature.bind(*bound, *passed[:first], **dict.fromkeys(passed[first:]))
        except (TypeError, ValueError) as error:
            return f"its method {name} does not take these arguments ({error}); {fix}"
    return None


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the most similar of the known names; empty where none is similar."""
    similar = difflib.get_close_matches(name[:_LONGEST_TYPO], known, 1)
    return f'; did you mean "{similar[0]}"?' if similar else ""


def factory(kind: Kind, settings: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Callable[[], Any]:
    """What creates the reward or environment that `settings` name, which are those of its section.

    It is a class without constructor arguments or, by a settings class, one that takes the settings; a reward may also
    be a function or an object that can be called. Raises ConfigError, whose message starts with a verb, and pydantic's
    ValidationError.
    """
    chosen: Callable[[], Any] = load(kind, settings["name"], environment)
    if kind == "rewards" and callable(chosen) and not isinstance(chosen, type):
        return lambda: chosen
    if not hasattr(chosen, "implementation"):
        return chosen
    # The name may be a class path, which the setting's own type rejects.
    own = chosen.model_validate({key: value for key, value in settings.items() if key != "name"})  # type: ignore[attr-defined]
    return functools.partial(implementation(own), own)


def implementation(settings: Any) -> Any:
    """The class that does what a settings object asks for: `implementation` of its class.

    Raises ConfigError when it cannot be imported.
    """
    path = settings.implementation
    try:
        return import_class(path)
    except ConfigError as error:
        name = type(settings).__name__
        raise ConfigError(f'implementation = "{path}" of the settings class {name} {error}') from None
