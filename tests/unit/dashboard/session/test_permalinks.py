"""Widgets and URL: the last change wins, and defaults are omitted."""

from __future__ import annotations

import pytest

from gxpo_dashboard.session.permalinks import adopt, in_address, wanted


def test_a_link_opens_the_view_it_names() -> None:
    assert adopt(["gxpo"], written=None, current=None, default=["grpo"]) == ["gxpo"]


def test_without_a_word_in_the_address_the_default_counts() -> None:
    assert adopt([], written=None, current=None, default=["grpo"]) == ["grpo"]


def test_a_choice_of_the_visitor_stays_while_the_address_is_ours() -> None:
    assert adopt(["a"], written=["a"], current=["b"], default=[]) == ["b"]
    assert adopt([], written=[], current=["b"], default=[]) == ["b"]


def test_the_back_button_wins_over_the_widget() -> None:
    assert adopt(["old"], written=["new"], current=["new"], default=[]) == ["old"]
    assert adopt([], written=["new"], current=["new"], default=["d"]) == ["d"]


def test_a_widget_that_was_gone_meanwhile_starts_from_the_address() -> None:
    assert adopt(["a", "b"], written=["a", "b"], current=None, default=[]) == ["a", "b"]


def test_an_emptied_choice_is_no_default() -> None:
    assert adopt(["a"], written=["a"], current=[], default=["a", "b"]) == []


def test_defaults_stay_out_of_the_address() -> None:
    assert in_address(["a", "b"], ["a", "b"]) == []
    assert in_address(["b"], ["a", "b"]) == ["b"]


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
    assert wanted(address, path, ["runs", "run", "compare", "submit"]) == view
