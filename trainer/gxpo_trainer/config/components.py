"""Sections whose settings class is chosen by one of their settings: `learner.rule` by its name, `learner.loss` by its
surrogate, and so on.

A chosen name is a built-in one, one that an installed package registers, or `module:Class` (gxpo_trainer.plugins). The
class of the last two is a settings class: a subclass of the section's base with fields of its own and the declaration
`implementation`, `module:Class` of what does the work. Its settings are validated, hashed, written and documented as
those of a built-in one are. Rewards and environments may also be plain classes without settings.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args

from pydantic import Discriminator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, Tag, create_model
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from gxpo_trainer import plugins
from gxpo_trainer.config.base import Settings
from gxpo_trainer.errors import ConfigError

CHOICE_ERROR = "component"
"""Type of the validation errors of this module; their context has `key` and `reason`."""
S = TypeVar("S", bound=Settings)
CHOICES: dict[type[Settings], Choice[Any]] = {}
"""By base class, in the order of the run file's sections."""


class Choice(Generic[S]):
    """Annotation of a field that is validated by the chosen settings class.

    section: its dotted path. base: of all its classes. classes: the built-in
    ones, told apart by the Literals of `key`, the setting that chooses; none: `base` alone, with the names
    `built_in`. inner: annotation that validates built-in ones, where the classes do not say it. plain: whether a class
    without settings is possible, which is validated as a built-in one. default: choice of a section
    without `key`.
    """

    def __init__(
        self,
        kind: plugins.Kind,
        section: str,
        base: type[S],
        *,
        classes: Sequence[type[S]] = (),
        built_in: Sequence[str] = (),
        key: str = "name",
        inner: Any = None,
        plain: bool = False,
        default: str | None = None,
    ) -> None:
        self.kind, self.section, self.base, self.key, self.plain = kind, section, base, key, plain
        self._default = default
        self.built_in = built_in or [name for each in classes for name in get_args(each.model_fields[key].annotation)]
        self._classes = classes or [base]
        union = functools.reduce(operator.or_, self._classes)
        self._inner = inner or (union if len(classes) < 2 else Annotated[union, Field(discriminator=key)])
        self._by_path: dict[str, type[S]] = {}
        self._broken: set[str] = set()
        CHOICES[base] = self

    def names(self) -> list[str]:
        """Built-in names, then the registered ones that may be used."""
        return list(dict.fromkeys([*self.built_in, *plugins.registered_names(self.kind)]))

    def known(self) -> list[type[S]]:
        """All settings classes: built-in, registered, listed by the administrator, and named in this process.

        A class that cannot be loaded is left out; an error is raised where a run file names it.
        """
        listed = sorted(filter(plugins.is_class_path, plugins.allowed(self.kind) or ()))
        loaded = []
        for name in dict.fromkeys([*plugins.registered_names(self.kind), *listed, *self._by_path]):
            if name in self.built_in or name in self._broken:
                continue
            try:
                if settings := self.settings_class(name):
                    loaded.append(settings)
            except ConfigError:
                self._broken.add(name)  # its module is not run again for each list
        return [*self._classes, *loaded]

    def settings_class(self, name: str) -> type[S] | None:
        """The settings class with this name, which is no built-in one; None for a plain class.

        Raises ConfigError, whose message starts with a verb.
        """
        plugins.check_unique(self.kind, name, self.built_in)
        if name not in self.names() and not plugins.is_class_path(name):
            near = plugins.suggestion(name, self.names())
            listed = ", ".join(f'"{known}"' for known in self.names())
            raise ConfigError(f"must be one of {listed}, or a class as package.module:Class{near}")
        loaded = plugins.load(self.kind, name)
        if not (isinstance(loaded, type) and issubclass(loaded, self.base)):
            if self.plain:
                return None
            raise ConfigError(
                f"is no settings class for gxpo.{self.kind}; name a subclass of {self.base.__module__}."
                f"{self.base.__name__} with `implementation`"
            )
        if not plugins.is_class_path(getattr(loaded, "implementation", "")):
            raise ConfigError(f'has no implementation; set {loaded.__name__}.implementation to "module:Class"')
        settings = _named(loaded, self.key, name)
        if plugins.is_class_path(name):
            self._by_path[name] = settings
        return settings

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        inner = handler.generate_schema(self._inner)
        # Serialized by the class of the value, which may be none of the inner schema.
        by_class = core_schema.simple_ser_schema("any")
        return core_schema.no_info_wrap_validator_function(self._validate, inner, serialization=by_class)

    def _validate(self, value: Any, handler: Callable[[Any], Any]) -> Any:
        if isinstance(value, self.base):
            return value
        if self._default and isinstance(value, dict):
            value = {self.key: self._default} | value
        name = value.get(self.key) if isinstance(value, dict) else None
        if not isinstance(name, str):
            return handler(value)
        try:
            if name in self.built_in:
                plugins.check_unique(self.kind, name, self.built_in)
                return handler(value)
            settings = self.settings_class(name)
        except ConfigError as error:
            # The machine that runs it may have it, and checks it; see config.io.load_run.
            if self.plain and isinstance(error, plugins.Unavailable) and value.keys() <= self.base.model_fields.keys():
                return handler(value)
            context = {"key": self.key, "reason": str(error)}
            raise PydanticCustomError(CHOICE_ERROR, "{reason}", context) from None
        return handler(value) if settings is None else settings.model_validate(value)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        built_in = handler(schema)
        if len(self._classes) > 1 and "discriminator" not in built_in:  # told apart by a function: `inner`
            own = [get_args(each.model_fields[self.key].annotation) for each in self._classes]
            owners = {name: next((i for i, names in enumerate(own) if name in names), 0) for name in self.built_in}
            mapping = {name: built_in["oneOf"][index]["$ref"] for name, index in owners.items()}
            built_in["discriminator"] = {"mapping": mapping, "propertyName": self.key}
        added = self.known()[len(self._classes) :]
        if not added:
            return built_in
        by_name = {str(each.model_fields[self.key].default): each.__pydantic_core_schema__ for each in added}
        union = handler(core_schema.tagged_union_schema(by_name, self.key))
        if "oneOf" not in built_in:
            mapping = dict.fromkeys(self.built_in, built_in["$ref"])
            built_in = {"discriminator": {"mapping": mapping, "propertyName": self.key}, "oneOf": [built_in]}
        if "discriminator" in built_in:
            built_in["discriminator"]["mapping"] |= union["discriminator"]["mapping"]
        return built_in | {"oneOf": [*built_in["oneOf"], *union["oneOf"]]}


def union_by_name(*classes: type[Settings]) -> Any:
    """Annotation of classes that the Literals of `name` tell apart; the first one has all other names."""
    tags = [[*get_args(each.model_fields["name"].annotation), "other"][0] for each in classes]

    def tag(value: Any) -> str:
        name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
        return str(name) if name in tags else "other"

    tagged: list[Any] = [Annotated[each, Tag(name)] for each, name in zip(classes, tags, strict=True)]
    return Annotated[functools.reduce(operator.or_, tagged), Discriminator(tag)]


@functools.cache
def _named(settings: type[S], key: str, name: str) -> type[S]:
    """The class with `name` as the only value of its setting `key`."""
    if settings.model_fields[key].default == name:
        return settings
    field: Any = (Literal[name], name)
    named: dict[str, Any] = {"__module__": settings.__module__, "__doc__": settings.__doc__, key: field}
    renamed = create_model(settings.__name__, __base__=settings, **named)

    def reduce(self: Settings) -> tuple[Any, ...]:
        return _restored, (settings, key, name, dict(self))

    # Processes that receive a config build the class again.
    renamed.__reduce__ = reduce  # type: ignore[method-assign, assignment]
    return renamed


def _restored(settings: type[Settings], key: str, name: str, values: dict[str, Any]) -> Settings:
    restored: Settings = _named(settings, key, name).model_validate(values)
    return restored
