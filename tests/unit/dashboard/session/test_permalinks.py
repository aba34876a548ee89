"""Parameters of the address: two widgets of a view never share one."""

from __future__ import annotations

import inspect
import re
from types import ModuleType

import pytest

from gxpo_dashboard import widgets
from gxpo_dashboard.views import benchmarks, compare, explorer, records, run, runs, samples, submit

SHARED = (widgets, explorer)


@pytest.mark.parametrize("modules", [(run, records, samples), (runs,), (compare,), (benchmarks,), (submit,)])
def test_each_parameter_of_a_view_is_of_one_widget(modules: tuple[ModuleType, ...]) -> None:
    source = "".join(map(inspect.getsource, (*modules, *SHARED)))
    names = re.findall(r"permalinks\.(?:text|check|select|choice|multi)\(\s*\"[^\"]*\",\s*\"(\w+)\"", source)
    assert names
    assert sorted(names) == sorted(set(names))
