"""A service of the module's own, and the pages of its dashboard."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from support.dashboard_pages import Pages
from support.replay import ReplayedService


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    service = ReplayedService(tmp_path_factory.mktemp("pages") / "home")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(os.environ, "GXPO_URL", service.url)
            yield Pages(service)
    finally:
        service.close()
