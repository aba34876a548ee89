"""The Submit view: each rule has settings of its own, and the address keeps the rule and the sweep."""

from __future__ import annotations

from streamlit.testing.v1 import AppTest
from support.dashboard_pages import Pages, labelled

from gxpo_dashboard.labels import plain

SFPO = ["3", "0.8", "1.0"]
"""K, α and τ that docs/configuration.md gives for SFPO."""


def settings(page: AppTest) -> list[str]:
    return [labelled(page.text_input, label).value for label in ("Rule K", "Rule α", "Gate τ")]


def test_another_rule_starts_from_its_own_defaults(pages: Pages) -> None:
    page = pages.open("submit", preset="demo")
    gxpo = settings(page)
    labelled(page.text_input, "Rule K").set_value("7").run()
    labelled(page.selectbox, "Rule name").set_value("sfpo").run()
    assert settings(page) == SFPO
    labelled(page.selectbox, "Rule name").set_value("gxpo").run()
    assert settings(page) == ["7", *gxpo[1:]]


def test_rule_and_sweep_are_kept_in_another_view_and_by_a_reload(pages: Pages) -> None:
    page = pages.open("submit", preset="demo", sweep="1")
    labelled(page.selectbox, "Rule name").set_value("sfpo").run()
    labelled(page.text_input, "Seeds").set_value("0, 1, 2, 3, 4").run()
    labelled(page.text_input, "K").set_value("3, 5").run()
    labelled(page.checkbox, "Learning-rate control").uncheck().run()
    labelled(page.button, "Runs").click().run()
    labelled(page.button, "Submit").click().run()
    for same in (page, pages.reload(page)):
        assert labelled(same.selectbox, "Rule name").value == "sfpo"
        assert labelled(same.text_input, "Seeds").value == "0, 1, 2, 3, 4"
        assert labelled(same.text_input, "K").value == "3, 5"
        assert labelled(same.checkbox, "Learning-rate control").value is False
        assert [metric.value for metric in same.metric if metric.label == "Runs"] == ["10"]


def test_what_was_typed_stays_after_a_reload(pages: Pages) -> None:
    page = pages.open("submit", preset="demo")
    labelled(page.text_input, "Rule K").set_value("7").run()
    labelled(page.text_input, "Name").set_value("a = b").run()
    labelled(page.text_input, "Tags").set_value("one, two").run()
    labelled(page.number_input, "Priority").set_value(5).run()
    page = pages.reload(page)
    typed = [labelled(page.text_input, label).value for label in ("Rule K", "Name", "Tags")]
    assert typed == ["7", "a = b", "one, two"]
    assert labelled(page.number_input, "Priority").value == 5
    [toml] = [code.value for code in page.code if "[learner.rule]" in code.value]
    assert "k = 7" in toml
    labelled(page.text_input, "Rule K").set_value("5").run()
    assert page.query_params["set"] == 'name="a = b"'


def test_a_link_changes_settings_of_collapsed_sections_and_names_what_it_cannot(pages: Pages) -> None:
    page = pages.open("submit", preset="demo", set=["rollout.temperature=0.7", "rollout.heat=1"], priority="high")
    [toml] = [code.value for code in page.code if "[rollout]" in code.value]
    assert "temperature = 0.7" in toml
    [warning] = page.warning
    assert plain("rollout.heat=1") in warning.value
    assert "temperature" not in warning.value
    assert labelled(page.number_input, "Priority").value == 0


def test_what_is_wrong_is_said_below_its_field(pages: Pages) -> None:
    page = pages.open("submit", preset="demo")
    for typed, message in {"many": "is not an integer", "1": "must be at least 2"}.items():
        labelled(page.text_input, "Rule K").set_value(typed).run()
        below = [words.value for words in page.markdown if words.value.startswith(":red[")]
        assert len(below) == 1, typed
        assert plain(message) in below[0]


def test_a_sweep_is_planned_before_it_is_submitted(pages: Pages) -> None:
    page = pages.open("submit", preset="demo", sweep="1")
    labelled(page.text_input, "K").set_value("3, 5").run()
    labelled(page.text_input, "τ").set_value("inf").run()
    # Two depths with three seeds, and the control of each depth with three seeds.
    assert labelled(page.button, "Submit 12 runs")
    assert "Plan of one run with the base settings; the sweep has 12 runs." in [words.value for words in page.caption]
    planned = next(table.value for table in page.table if "Run" in table.value)
    assert sorted(planned["Seed"]) == ["0"] * 4 + ["1"] * 4 + ["2"] * 4
