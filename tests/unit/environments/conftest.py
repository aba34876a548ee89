"""The faulty environments as an allowed module of the worker processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from gxpo_trainer.config.environment import EnvironmentConfig

MODULE = "faulty_environments"
CLASSES = (
    *("Counter", "Forgetful", "Drifting", "NoMessages", "LongReset", "ManyMessages", "TextReset", "FailingConstructor"),
    *("NoStep", "NoReset", "WrongStep", "AsynchronousStep", "NeedsArguments", "NOT_A_CLASS", "Missing"),
)


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., EnvironmentConfig]:
    """The settings for one of the faulty classes, which are allowed and importable."""
    monkeypatch.setenv("GXPO_ENVIRONMENT_ALLOWLIST", ",".join(f"{MODULE}:{name}" for name in CLASSES))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.syspath_prepend(Path(__file__).parent)

    def config(name: str = "Counter", **settings: object) -> EnvironmentConfig:
        return EnvironmentConfig.model_validate({"name": f"{MODULE}:{name}", "deadline_s": 60.0, **settings})

    return config


@pytest.fixture
def descendants() -> Callable[[], set[int]]:
    """Processes that did not exist before the test and have this one, or a worker process, among their ancestors."""
    before = {process.pid for process in psutil.process_iter()}

    def found() -> set[int]:
        ours = set()
        for process in psutil.process_iter():
            try:
                tagged = "GXPO_ENVIRONMENT_WORKER" in process.environ()
                if process.pid not in before and process.status() != psutil.STATUS_ZOMBIE and tagged:
                    ours.add(process.pid)
            except psutil.Error:
                continue
        return ours - {os.getpid()}

    return found
