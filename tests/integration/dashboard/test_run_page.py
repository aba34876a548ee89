"""The Run view: its header, and samples grouped by prompt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest
from support.dashboard_pages import Pages, labelled, table_columns
from support.reporting import evaluation_row, metric_row, sample_row

from gxpo_client import client
from gxpo_client.client import Client
from gxpo_client.errors import ServiceUnavailable
from gxpo_dashboard.labels import REASONS, plain
from gxpo_dashboard.session.visitor import LOG_WINDOW
from gxpo_dashboard.views import run as run_view, samples
from gxpo_trainer.config import RunConfig


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


def test_responses_without_a_reward_are_left_out_of_the_range(pages: Pages) -> None:
    run = pages.submit("rewards")
    rewards = {"none": [None, None], "one": [None, 1.0], "several": [0.5, None, -1.0]}
    rows = [
        sample_row(1, sample=sample, extracted=answer, reward=reward)
        for answer, given in rewards.items()
        for sample, reward in enumerate(given)
    ]
    pages.service.report(run, samples=[row | {"sample": sample} for sample, row in enumerate(rows)])
    page = pages.open("run", run=run, part="Samples")
    shown = {
        answer: words.value.partition("reward ")[2].partition(",")[0]
        for words in page.markdown
        for answer in rewards
        if f"answer **{answer}**" in words.value
    }
    assert shown == {"none": "–", "one": "1", "several": "−1 to 0\\.5"}


def test_a_page_of_samples_with_a_verdict_counts_responses(pages: Pages) -> None:
    run = pages.submit("verdicts")
    rows = [sample_row(1, sample=sample, verdict="wrong") for sample in range(501)]
    pages.service.report(run, samples=rows)
    page = pages.open("run", run=run, part="Samples", verdict="wrong", step="1")
    assert "Samples 1 to 500" in [caption.value for caption in page.caption]


def test_a_part_of_the_axis_without_points_is_said_to_have_none(pages: Pages) -> None:
    run = pages.submit("zoomed")
    pages.service.report(run, metrics=[metric_row(1)])
    address = {"run": run, "from": "5", "to": "9"}
    page = pages.open("run", {"axis": "step"}, **address)
    assert "No points in the visible range." in [text.value for text in page.markdown]


@pytest.mark.parametrize("end", ["from", "to"])
def test_one_end_of_a_range_is_said_to_need_the_other(pages: Pages, end: str) -> None:
    run = pages.submit(f"range {end}")
    pages.service.report(run, metrics=[metric_row(1)])
    captions = [caption.value for caption in pages.open("run", run=run, **{end: "5"}).caption]
    assert ":red[Visible from and to are two numbers, the smaller one first.]" in captions


def test_a_warm_start_is_drawn_over_steps_whatever_the_axis(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    warm = pages.submit("warm", "warm_start.steps=2", "learner.loss.kl_beta=0")
    rows = [metric_row(step, **{"warm_start/loss": 3.0 - step, "update/backward_passes_total": 0}) for step in (1, 2)]
    rows.append(metric_row(3, **{"update/backward_passes_total": 3}))
    costs = {0: 0, 2: 0, 3: 3}
    evaluations = [evaluation_row(step, backward_passes_total=passes) for step, passes in costs.items()]
    pages.service.report(warm, metrics=rows, evaluations=evaluations)
    drawn = {}
    monkeypatch.setattr(run_view, "chart", lambda chart, scope: drawn.update({chart.key: chart}))
    pages.open("run", run=warm, x="backward_passes")
    assert drawn["reward"].x == "backward_passes"
    assert drawn["warm-start"].points[["x", "y"]].to_numpy().tolist() == [[1, 2], [2, 1]]
    assert drawn["accuracy-pass@1"].points[["step", "x"]].to_numpy().tolist() == [[2, 0], [3, 3]]
    pages.open("run", run=warm)
    assert drawn["accuracy-pass@1"].points["x"].tolist() == [0, 2, 3]


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


def test_a_prompt_that_is_read_stays_while_its_run_takes_further_steps(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "FRESH_S", 0.0)
    shown: list[str] = []
    chosen: dict[str, list[str]] = {}

    def table(key: str, title: str, columns: list[Any], rows: list[Any], selected: list[str], **_: Any) -> Any:
        shown[:] = [key, *(row["id"] for row in rows)]
        return SimpleNamespace(selected=chosen.get(key))

    monkeypatch.setattr(samples, "table", table)
    run = pages.submit("read")
    for step in (4, 5, 6):
        rows = [sample_row(step, group=group, prompt_id=f"p{group}", prompt=f"Prompt {group}") for group in (0, 1)]
        pages.service.report(run, samples=rows, offsets={"samples": 2 * (step - 4)})
        if step == 4:
            page = pages.open("run", run=run, part="Samples")
            assert "Newest (step 4)" not in [button.label for button in page.button]
        elif step == 5:
            page.run()
            assert "step" not in page.query_params, "without a selection the newest step is shown"
            assert shown[1].endswith("-5-1-0-p0")
            chosen[shown[0]] = [shown[2]]
            before = [*shown]
        page.run()
    assert page.query_params["step"] in ("5", ["5"])
    assert shown == before, "the same table, in which the browser keeps focus and scroll position"
    assert labelled(page.selectbox, "Step").value == "5"
    assert "Prompt 1" in [code.value for code in page.code]
    labelled(page.button, "Newest (step 6)").click().run()
    for _ in range(2):
        assert "step" not in page.query_params
        assert shown[1].endswith("-6-1-0-p0")
        page.run()


def test_a_later_page_of_samples_has_those_of_the_run_alone(pages: Pages) -> None:
    first, second = pages.submit("long"), pages.submit("short")
    pages.service.report(first, samples=[sample_row(step) for step in range(501)])
    pages.service.report(second, samples=[sample_row(1)])
    page = pages.open("run", run=first, part="Samples", prompt="p1", also=second)
    assert len(table_columns(page)["Run"]) == 501
    assert "Samples 1 to 500" in [caption.value for caption in page.caption]
    # A page without a browser has no fragments: it is drawn by the next run.
    labelled(page.button, "Next").click().run()
    assert table_columns(page.run())["Run"] == ["long"]
    assert "Samples 501 to 501" in [caption.value for caption in page.caption]


def test_a_config_is_compared_with_the_nearest_preset_and_with_another_run(pages: Pages) -> None:
    hostile = "![x](http://evil.example/x.png)"
    run, other = pages.submit("own", "learner.rule.k=9"), pages.submit(hostile, "seed=4")

    def shown(**query: str) -> list[list[str]]:
        page = pages.open("run", run=run, part="Config", **query)
        return [row[:3] for row in page.dataframe[0].value.values.tolist()]

    assert ["learner.rule.k", "9", "5"] in shown()
    assert all(own != others for _, own, others in shown())
    assert shown(against=other) == [["name", "own", hostile], ["seed", "0", "4"], ["learner.rule.k", "9", "5"]]
    captions = [caption.value for caption in pages.open("run", run=run, part="Config", against=other).caption]
    assert [words for words in captions if f"differ from run {plain(hostile)} " in words]
    assert shown(against=other, setting="gate") == []
    assert ["learner.rule.gate.threshold", "3.0", "3.0"] in shown(against=other, setting="gate", unchanged="1")


@pytest.mark.parametrize(
    "part",
    ["Overview", "Gate", "Look-ahead", "Policy", "Metrics", "Samples", "System", "Log", "Checkpoints"],
)
def test_a_run_without_data_says_what_it_waits_for_and_an_ended_one_that_there_is_none(pages: Pages, part: str) -> None:
    holder, run = (pages.submit(f"{name} {part}") for name in ("holds", "waits"))
    pages.service.report(holder)
    words = [text.value for text in pages.open("run", run=run, part=part).markdown]
    (cause,) = [text for text in words if "Queued at position" in text]
    assert f"held by holds {plain(part)}" in cause
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


def test_a_failed_run_says_its_reason_and_what_to_do_apart(pages: Pages) -> None:
    run = pages.submit("failed")
    outcome = {
        "attempt": 1,
        "outcome": "failed",
        "ended_by": None,
        "reason": "setup_failed",
        "message": "x",
        "time": 1.0,
    }
    page = pages.open("run", run=run)
    assert page.get("progress")
    pages.service.report(run, outcome=outcome)
    page = pages.open("run", run=run)
    assert not page.get("progress"), "a bar, perhaps a full one"
    assert [text for text in page.markdown if text.value.startswith("**0%** of the budget")]
    (error,) = page.error
    assert error.value.split("\n\n") == [
        plain(part) for part in ("Failed before the first step: setup failed. x", REASONS["setup_failed"])
    ]


def test_a_run_that_does_not_exist_leads_to_the_others(pages: Pages) -> None:
    page = pages.open("run", run="r01gone0000000000000")
    assert [title.value for title in page.title] == ["Run"]
    assert [text.value for text in page.markdown if "There is no run r01gone0000000000000" in text.value]
    assert not page.error


def test_names_of_metrics_are_no_markdown(pages: Pages) -> None:
    run = pages.submit("odd metrics")
    pages.service.report(run, metrics=[metric_row(1, **{"*m*/a": 1.0, "b/c": 2.0})])
    page = pages.open("run", run=run, part="Metrics")
    (groups,) = [control for control in page.button_group if control.key == "in_prefix"]
    assert groups.options == ["all", r"\*m\*", "b"]


def test_the_end_of_a_log_without_an_end_of_line_is_shown(pages: Pages) -> None:
    run = pages.submit("one line")
    pages.service.report(run)
    log = pages.service.settings.artifacts / run / "train.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("π" * (LOG_WINDOW // 2 + 1), encoding="utf-8")
    page = pages.open("run", run=run, part="Log")
    assert "1 line of the last 256.0 KiB of 256.0 KiB." in [caption.value for caption in page.caption]
    assert [code.value for code in page.code] == ["π" * (LOG_WINDOW // 2)]


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


def test_a_sweep_that_hours_end_has_no_number_of_passes(pages: Pages) -> None:
    words = ["budget.steps=null", "budget.backward_passes=null", "budget.hours=0.5", "seed=[0, 1]"]
    page = pages.open("submit", preset="demo", set=words)
    assert labelled(page.button, "Submit 2 runs")
    planned = next(table.value for table in page.table if "Run" in table.value)
    assert planned["Backward passes"].tolist() == ["–", "–"]
    assert not [caption.value for caption in page.caption if "At most" in caption.value]
    assert [text.value for text in page.markdown if plain("2 runs, about 1 h 0 min one after another") in text.value]


def test_another_loss_has_its_own_settings_in_the_form_a_link_and_a_clone(pages: Pages) -> None:
    run = pages.submit(
        "masked", "learner.loss.surrogate=dppo", "learner.loss.divergence=kl", "learner.loss.kl_beta=0.01"
    )
    page = pages.open("submit", {"section-learner": True}, preset=run)
    assert labelled(page.selectbox, "Loss divergence").value == "kl"
    labelled(page.selectbox, "Loss surrogate").set_value("ppo").run()
    assert "Loss divergence" not in [box.label for box in page.selectbox]
    assert labelled(page.text_input, "Loss clip low").value == "0.2"
    assert [words for words in page.success if words.value.startswith("Valid.")], [text.value for text in page.text]
    assert "kl_beta = 0.01" in toml(page)
    page = pages.open("submit", {"section-learner": True}, preset="demo")
    labelled(page.text_input, "Loss clip low").set_value("0.1").run()
    labelled(page.selectbox, "Loss surrogate").set_value("dppo").run()
    assert labelled(page.text_input, "Loss clip low").value == "0.15"
    labelled(page.selectbox, "Loss divergence").set_value("kl").run()
    same = pages.reload(page)
    assert not same.warning
    for shown in (page, same):
        assert 'divergence = "kl"' in toml(shown)
        assert [words for words in shown.success if words.value.startswith("Valid.")]
    page = pages.open("submit", {"section-environment": True}, preset="demo")
    labelled(page.text_input, "Environment name").set_value("agent").run()
    assert labelled(page.text_input, "Environment max turns").value == "16", "the agent's default"
    assert labelled(page.text_input, "Environment command")


def toml(page: AppTest) -> str:
    """The run file of what is filled in."""
    [file] = [code.value for code in page.code if "[rollout]" in code.value]
    return str(file)


SECTIONS = {f"section-{name}": True for name in RunConfig.model_fields}


@pytest.mark.parametrize("preset", ["paper-1.5b", "clone"])
def test_opened_sections_change_nothing(pages: Pages, preset: str) -> None:
    values = [
        'evaluation.stop=["\\n\\n", "Q:", "1"]', 'data.system_prompt="Think.\\n"', 'data.template="{problem}\\n"',
        'data.split=""', "placement.colocate=true", "rollout.enforce_eager=false",
    ]  # fmt: skip
    preset = pages.submit("of lines", *values) if preset == "clone" else preset
    files = []
    for state in ({}, SECTIONS):
        page = pages.open("submit", state, preset=preset)
        assert "set" not in page.query_params
        assert [words for words in page.success if words.value.startswith("Valid.")], [text.value for text in page.text]
        files.append(toml(page))
    assert labelled(page.text_input, "Data source")
    assert files[0] == files[1]


def test_a_link_changes_settings_of_collapsed_sections_and_names_what_it_cannot(pages: Pages) -> None:
    words = ['learner.rule.name="sfpo"', "learner.rule.k=4", "rollout.temperature=0.7", "rollout.heat=1"]
    page = pages.open("submit", preset="demo", set=words)
    assert labelled(page.selectbox, "Rule name").value == "sfpo"
    assert settings(page) == ["4", *SFPO[1:]]
    assert 'name = "sfpo"' in toml(page)
    assert "temperature = 0.7" in toml(page)
    [warning] = page.warning
    assert plain("rollout.heat=1") in warning.value
    assert "temperature" not in warning.value


@pytest.mark.parametrize(
    ("label", "typed", "message"),
    [
        ("Rule K", "many", "is not an integer"),
        ("Rule K", "1", "must be at least 2"),
        ("Rule K", "1,000", "write 1000 for a thousand"),
        ("Seed", "-1, 2", "must be at least 0"),
        ("Verifier rewards", '[{"name": "correctness", "weight": "x"}]', "must be a number"),
    ],
)
def test_what_is_wrong_is_said_below_its_field(pages: Pages, label: str, typed: str, message: str) -> None:
    page = pages.open("submit", {"section-verifier": True}, preset="demo")
    labelled(page.text_input, label).set_value(typed).run()
    below = [words.value for words in page.markdown if words.value.startswith(":red[")]
    assert len(below) == 1
    assert plain(message) in below[0]
    assert not [text.value for text in page.text if "config." in text.value], "as the field and a file name it"


def test_a_mistake_stays_in_a_collapsed_section_and_in_another_view(pages: Pages) -> None:
    page = pages.open("submit", {"section-rollout": True}, preset="demo")
    labelled(page.text_input, "Rollout temperature").set_value("warm").run()
    page.session_state["section-rollout"] = False
    page.run()
    for presses in ([], ["Runs", "Submit"]):
        for press in presses:
            labelled(page.button, press).click().run()
        assert [text for text in page.text if "rollout.temperature = 'warm' is not a number" in text.value], presses
        assert not page.success
    page.session_state["section-rollout"] = True
    assert labelled(page.run().text_input, "Rollout temperature").value == "warm"


def test_a_lost_answer_makes_no_second_run_of_the_same_and_keeps_no_other_back(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, lost = Client.submit, [True, False, True, False, True]

    def answered(self: Client, *body: Any, **to: Any) -> dict[str, Any]:
        made = submit(self, *body, **to)
        if lost and lost.pop(0):
            raise ServiceUnavailable("the answer is lost")
        return made

    def press(*numbers: int) -> list[str]:
        for number in numbers:
            labelled(page.text_input, "Name").set_value(f"answer {number}").run()
            labelled(page.button, "Submit run").click().run()
        runs = pages.http.get("/runs", params={"text": "answer"}).json()["items"]
        names.update({run["name"]: run["id"] for run in runs})
        return sorted(run["name"] for run in runs)

    monkeypatch.setattr(Client, "submit", answered)
    names: dict[str, str] = {}
    page = pages.open("submit", preset="demo")
    assert press(1, 1) == ["answer 1"]
    assert page.query_params["run"] == names["answer 1"]
    labelled(page.button, "Submit").click().run()
    assert press(2, 3) == ["answer 1", "answer 2", "answer 3"]
    assert page.query_params["run"] == names["answer 3"]
    labelled(page.button, "Submit").click().run()
    press(4)
    pages.cancel(names["answer 4"])
    pages.http.delete(f"/runs/{names['answer 4']}").raise_for_status()
    press(4)
    assert [error.value for error in page.error if "was deleted" in error.value]
    assert press(4)[-1] == "answer 4"


@pytest.mark.parametrize("clone", [["Clone"], ["Search", "This run › Clone"]], ids="–".join)
def test_a_clone_has_the_settings_and_tags_of_its_run_whatever_an_earlier_one_had(
    pages: Pages, clone: list[str]
) -> None:
    run = pages.submit("original", "seed=3", tags=["a, b", "c"])
    page = pages.open("run", run=run)
    for _ in range(2):
        for press in clone:
            labelled(page.button, press).click().run()
        assert labelled(page.text_input, "Seed").value == "3"
        labelled(page.text_input, "Seed").set_value("7").run()
        labelled(page.button, "Run").click().run()
    labelled(page.button, "Submit").click().run()
    assert labelled(page.text_input, "Seed").value == "7", "by the bar, the form is as it was left"
    labelled(page.button, "Submit run").click().run()
    view = pages.http.get(f"/runs/{page.query_params['run']}").json()
    assert (view["parent_id"], view["config"]["seed"], view["tags"]) == (run, 7, ["a, b", "c"])


def test_a_clone_of_a_run_that_is_gone_is_not_taken_for_a_preset(pages: Pages) -> None:
    page = pages.open("submit", preset="r01gone0000000000000")
    words = "There is no run or preset r01gone0000000000000; these are the settings of demo."
    assert [warning.value for warning in page.warning] == [plain(words)]
    assert not pages.open("submit", preset="demo").warning


def test_an_edit_changes_nothing_else_that_others_have_changed_meanwhile(pages: Pages) -> None:
    run = pages.submit("mine", tags=["a"])
    page = pages.open("run", run=run)
    labelled(page.button, "Edit…").click().run()
    pages.http.patch(f"/runs/{run}", json={"notes": "theirs", "tags": ["b"]})
    labelled(page.text_input, "Name").set_value("renamed")
    page.button(key="edit-save").click().run()
    view = pages.http.get(f"/runs/{run}").json()
    assert (view["name"], view["notes"], view["tags"]) == ("renamed", "theirs", ["b"])


def test_an_edit_keeps_the_tags_that_it_does_not_change(pages: Pages) -> None:
    run = pages.submit("tagged", tags=["a, b", "c"])
    page = pages.open("run", run=run)
    for typed, tags in {None: ["a, b", "c"], "a, d": ["a", "d"]}.items():
        labelled(page.button, "Edit…").click().run()
        if typed:
            labelled(page.text_input, "Tags").set_value(typed)
        page.button(key="edit-save").click().run()
        assert pages.http.get(f"/runs/{run}").json()["tags"] == tags
