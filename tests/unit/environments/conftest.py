"""The faulty environments as an allowed module of the worker processes."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.processes import processes_with

from gxpo_trainer.config.tasks import EnvironmentConfig

MODULE = "faulty_environments"
CLASSES = re.findall(r"^class (\w+)", Path(__file__).with_name(f"{MODULE}.py").read_text(), re.MULTILINE)


@pytest.fixture
def anyio_backend() -> str:
    """Tests that are coroutines run on asyncio."""
    return "asyncio"


@pytest.fixture
def configured(
    monkeypatch: pytest.MonkeyPatch, descendants: Callable[[], set[int]]
) -> Iterator[Callable[..., EnvironmentConfig]]:
    """The settings for one of the faulty classes, which are allowed and importable. No process is left at the end."""
    monkeypatch.setenv("GXPO_ENVIRONMENT_ALLOWLIST", ",".join(f"{MODULE}:{n}" for n in (*CLASSES, "Missing")))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.syspath_prepend(Path(__file__).parent)

    def config(name: str = "Counter", **settings: object) -> EnvironmentConfig:
        return EnvironmentConfig.model_validate({"name": f"{MODULE}:{name}", "deadline_s": 60.0, **settings})

    yield config
    assert descendants() == set()


@pytest.fixture
def descendants(monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[int]]:
    """The processes that this test has started, and theirs."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("TEST_OF_ENVIRONMENTS", mark)

    return lambda: processes_with(TEST_OF_ENVIRONMENTS=mark)
