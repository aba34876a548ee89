"""A service of the module's own, and the pages of its dashboard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from support.dashboard_pages import Pages
from support.replay import ReplayedService


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    home = tmp_path_factory.mktemp("pages") / "home"
    with closing(ReplayedService(home)) as service, pytest.MonkeyPatch.context() as patch:
        patch.setenv("GXPO_URL", service.url)
        yield Pages(service)
