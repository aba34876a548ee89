"""The Run view: its header, and samples grouped by prompt."""

from __future__ import annotations

import pytest
from streamlit.testing.v1 import AppTest
from support.dashboard_pages import Pages, labelled, table_columns
from support.reporting import metric_row, sample_row

from gxpo_dashboard.labels import plain


def test_counts_of_a_prompt_are_of_all_its_responses(pages: Pages) -> None:
    """Seven prompts of eight responses, the most correct one last. Older steps are hidden."""
    run = pages.submit("samples")
    rows = [
        sample_row(1, group=group, sample=sample, prompt_id=f"p{group}", verdict="wrong")
        for group in range(7)
        for sample in range(8)
    ]
    for row in rows[:7]:
        row["verdict"] = "correct"
        row["rendered_prompt"] = "<|user|>**1 + 1?**<|assistant|>"
    pages.service.report(run, samples=[sample_row(0), *rows])
    page = pages.open("run", run=run, part="Samples")
    assert table_columns(page)["Correct"] == [*["0 of 8"] * 6, "7 of 8"]
    page = pages.open("run", run=run, part="Samples", verdict="correct")
    assert table_columns(page)["Correct"] == ["7 of 8"]
    (answer,) = [words.value for words in page.markdown if "✔ correct" in words.value]
    assert "**7×** answer **2**" in answer
    (seen,) = [each for each in page.expander if each.label == "What the policy saw"]
    assert [code.value for code in seen.code] == ["<|user|>**1 + 1?**<|assistant|>"]


def test_a_prompt_is_followed_across_steps_and_runs(pages: Pages) -> None:
    first, second = pages.submit("first"), pages.submit("second")
    for run, verdicts in {first: ("wrong", "correct"), second: ("correct", "correct")}.items():
        rows = [sample_row(step, verdict=verdict) for step, verdict in enumerate(verdicts, 4)]
        pages.service.report(run, samples=[*rows, sample_row(5, group=1, prompt_id="p2", prompt="other")])
    page = pages.open("run", run=first, part="Samples")
    labelled(page.button, "All steps").click().run()
    assert page.query_params["prompt"] == "p1"
    columns = table_columns(page)
    assert (columns["Step"], columns["Correct"]) == (["4", "5"], ["0 of 1", "1 of 1"])
    page = pages.open("run", run=first, part="Samples", prompt="p1", also=second)
    columns = table_columns(page)
    assert (columns["Run"][0], columns["Step"][0]) == ("first", "4")
    assert sorted(columns["Run"]) == ["first"] * 2 + ["second"] * 2


def test_a_config_is_compared_with_the_nearest_preset_and_with_another_run(pages: Pages) -> None:
    run, other = pages.submit("own", "learner.rule.k=9"), pages.submit("other", "seed=4")

    def shown(**query: str) -> list[list[str]]:
        page = pages.open("run", run=run, part="Config", **query)
        return [row[:3] for row in page.dataframe[0].value.values.tolist()]

    assert ["learner.rule.k", "9", "5"] in shown()
    assert all(own != others for _, own, others in shown())
    assert shown(against=other) == [["name", "own", "other"], ["seed", "0", "4"], ["learner.rule.k", "9", "5"]]
    assert shown(against=other, setting="gate") == []
    assert ["learner.rule.gate.threshold", "3.0", "3.0"] in shown(against=other, setting="gate", unchanged="1")


@pytest.mark.parametrize("part", ["Overview", "Metrics", "Checkpoints"])
def test_a_run_without_data_says_what_it_waits_for_and_an_ended_one_that_there_is_none(pages: Pages, part: str) -> None:
    holder, run = (pages.submit(f"{name} {part}") for name in ("holds", "waits"))
    pages.service.report(holder)
    words = [text.value for text in pages.open("run", run=run, part=part).markdown]
    (cause,) = [text for text in words if "Queued at position" in text]
    assert f"held by holds {part}" in cause
    assert f"(?view=run&run={holder})" in cause
    pages.cancel(run)
    words = [text.value for text in pages.open("run", run=run, part=part).markdown]
    assert [text for text in words if text == r"Cancelled before the first step\."]
    pages.cancel(holder)


def test_a_sentence_of_the_headline_opens_its_evidence(pages: Pages) -> None:
    holder, run = (pages.submit(name) for name in ("holder", "waiting"))
    pages.service.report(holder, metrics=[metric_row(1, **{"gate/threshold": 3.0, "gate/z": 1.5})])
    page = pages.open("run", run=run)
    (queued,) = [button for button in page.button if "Queued at position" in button.label]
    queued.click().run()
    assert holder in page.query_params["run"]
    (gate,) = [button for button in page.button if button.label.startswith("**The gate has not fired")]
    gate.click().run()
    assert holder in page.query_params["run"]
    assert page.query_params["part"] in ("Training", ["Training"]), "whose first section is Gate"
    for each in (run, holder):
        pages.cancel(each)


# The Submit view: each rule has settings of its own, and the address keeps the rule and the sweep.


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


def test_a_sweep_is_planned_and_kept_in_another_view_and_by_a_reload(pages: Pages) -> None:
    page = pages.open("submit", preset="demo")
    labelled(page.selectbox, "Rule name").set_value("sfpo").run()
    labelled(page.text_input, "Rule K").set_value("3, 3").run()
    assert [text.value for text in page.markdown if "contains 3 twice" in text.value], "at its field"
    labelled(page.text_input, "Rule K").set_value("3, 5").run()
    labelled(page.text_input, "Gate τ").set_value("inf").run()
    assert labelled(page.button, "Submit 2 runs"), "nothing but what was typed"
    labelled(page.text_input, "Seed").set_value("0, 1, 2").run()
    labelled(page.checkbox, "Learning-rate control").check().run()
    labelled(page.button, "Runs").click().run()
    labelled(page.button, "Submit").click().run()
    # Two depths with three seeds, and the control of each depth with three seeds.
    words = "Plan of one run with the base settings; the sweep has 12 runs."
    for same in (page, pages.reload(page)):
        assert labelled(same.selectbox, "Rule name").value == "sfpo"
        assert labelled(same.text_input, "Seed").value == "0, 1, 2"
        assert labelled(same.text_input, "Rule K").value == "3, 5"
        assert labelled(same.checkbox, "Learning-rate control").value is True
        assert labelled(same.button, "Submit 12 runs")
        assert any(plain("4 settings × 3 seeds = 12 runs, about ") in text.value for text in same.markdown)
        assert words in [caption.value for caption in same.caption]
        planned = next(table.value for table in same.table if "Run" in table.value)
        assert sorted(planned["Seed"]) == ["0"] * 4 + ["1"] * 4 + ["2"] * 4


def test_a_link_changes_settings_of_collapsed_sections_and_names_what_it_cannot(pages: Pages) -> None:
    page = pages.open("submit", preset="demo", set=["rollout.temperature=0.7", "rollout.heat=1"])
    [toml] = [code.value for code in page.code if "[rollout]" in code.value]
    assert "temperature = 0.7" in toml
    [warning] = page.warning
    assert plain("rollout.heat=1") in warning.value
    assert "temperature" not in warning.value


def test_what_is_wrong_is_said_below_its_field(pages: Pages) -> None:
    page = pages.open("submit", preset="demo")
    for typed, message in {"many": "is not an integer", "1": "must be at least 2"}.items():
        labelled(page.text_input, "Rule K").set_value(typed).run()
        below = [words.value for words in page.markdown if words.value.startswith(":red[")]
        assert len(below) == 1, typed
        assert plain(message) in below[0]
