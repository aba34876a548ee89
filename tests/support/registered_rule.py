"""A rule of a test module, as if an installed package registered it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from unittest import mock

from gxpo_trainer import plugins
from gxpo_trainer.config import RuleSettings
from gxpo_trainer.config.rules import rule_name


@contextmanager
def registered(settings: type[RuleSettings]) -> Iterator[None]:
    """Register a settings class within the block."""
    name = rule_name(settings)
    entry = EntryPoint(name, f"{settings.__module__}:{settings.__name__}", "gxpo.rules")
    known = plugins._registered()
    extended = {**known, "rules": {**known["rules"], name: (entry,)}}
    with mock.patch.object(plugins, "_registered", return_value=extended):
        yield
