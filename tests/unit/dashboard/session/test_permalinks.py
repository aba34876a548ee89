"""Widgets and URL: the last change wins, and defaults are omitted."""

from __future__ import annotations

import pytest
from streamlit.testing.v1 import AppTest

from gxpo_dashboard.session.permalinks import adopt, view_of


@pytest.mark.parametrize(
    ("address", "written", "current", "default", "values"),
    [
        pytest.param(["gxpo"], None, None, ["grpo"], ["gxpo"], id="a link opens the view it names"),
        pytest.param([], None, None, ["grpo"], ["grpo"], id="without a parameter the default counts"),
        pytest.param(["a"], ["a"], ["b"], [], ["b"], id="a choice stays while the address is ours"),
        pytest.param([], [], ["b"], [], ["b"], id="also where the address is empty"),
        pytest.param(["old"], ["new"], ["new"], [], ["old"], id="the back button wins over the widget"),
        pytest.param([], ["new"], ["new"], ["d"], ["d"], id="also back to the default"),
        pytest.param(["a", "b"], ["a", "b"], None, [], ["a", "b"], id="a removed widget starts from the address"),
        pytest.param(["a"], ["a"], [], ["a", "b"], [], id="an emptied choice is no default"),
    ],
)
def test_the_last_change_wins(
    address: list[str], written: list[str] | None, current: list[str] | None, default: list[str], values: list[str]
) -> None:
    assert adopt(address, written, current, default) == values


def _script() -> None:  # run as a script without this module's imports
    import streamlit as st

    from gxpo_dashboard.session import permalinks

    permalinks.multi("Columns", "cols", ["a", "b"], ["a", "b"])
    permalinks.text("Seeds", "seeds", "0, 1")
    st.session_state["group"] = permalinks.choice("Group", "group", {"": "all", "a": "A"}, "a")


def test_defaults_stay_out_of_the_address_and_an_emptied_text_with_a_default_is_in_it() -> None:
    page = AppTest.from_function(_script).run(timeout=60)
    assert dict(page.query_params) == {}
    page.multiselect[0].unselect("a").run()
    page.text_input[0].set_value("").run()
    page.button_group[0].set_value("").run()
    assert page.session_state["group"] == ""
    assert dict(page.query_params) == {"cols": "b", "seeds": "", "group": ""}


@pytest.mark.parametrize(
    ("address", "path", "view"),
    [
        ({"view": "compare"}, "/run", "compare"),
        ({}, "compare", "compare"),
        ({"view": "nonsense"}, "submit", "submit"),
        ({"view": "nonsense"}, "nonsense", "runs"),
        ({}, "", "runs"),
    ],
)
def test_the_parameter_names_the_view_and_the_path_is_an_entry(address: dict[str, str], path: str, view: str) -> None:
    assert view_of(address, path, ["runs", "run", "compare", "submit"]) == view
