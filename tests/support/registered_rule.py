"""A rule registered at run time, as if its line stood in the registry when the config classes were built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gxpo_services.runs import configs
from gxpo_trainer.config import LearnerConfig, RuleSettings, RunConfig, messages
from gxpo_trainer.config.rules import RULES


@contextmanager
def registered(settings: type[RuleSettings]) -> Iterator[None]:
    """Register a settings class within the block."""
    RULES.append(settings)
    try:
        _rebuild()
        yield
    finally:
        RULES.remove(settings)
        _rebuild()


def _rebuild() -> None:
    """What an import does: the classes that contain the union, and what is computed from them once."""
    for model in (LearnerConfig, RunConfig):
        model.model_rebuild(force=True)
    messages.setting_paths.cache_clear()
    configs.config_schema.cache_clear()
