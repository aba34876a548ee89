"""The submit form covers every setting of the config, and what is typed becomes settings."""

from __future__ import annotations

import colorsys
import json
import math
import tomllib
from pathlib import Path

import pytest
from support.contrast import contrast

import gxpo_dashboard
from gxpo_dashboard.view_models import forms
from gxpo_dashboard.view_models.rules import HUES, rules_of, shade
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import load_preset, preset_names

SCHEMA = RunConfig.model_json_schema()


def config(rule: str = "gxpo") -> dict[str, object]:
    return RunConfig.model_validate({"learner": {"rule": {"name": rule}}}).model_dump(mode="json")


def settings(rule: str = "gxpo") -> dict[str, forms.Setting]:
    return {setting.path: setting for setting in forms.settings_of(SCHEMA, config(rule))}


def leaves(value: object, path: str = "") -> set[str]:
    if isinstance(value, dict):
        return {leaf for name, part in value.items() for leaf in leaves(part, f"{path}.{name}" if path else name)}
    return {path}


@pytest.mark.parametrize("rule", ["grpo", "sfpo", "gxpo"])
def test_every_setting_of_a_config_can_be_asked_for_and_comes_back_unchanged(rule: str) -> None:
    assert set(settings(rule)) == leaves(config(rule))
    assert_unchanged(config(rule))


@pytest.mark.parametrize("preset", preset_names())
def test_every_setting_of_a_preset_comes_back_unchanged(preset: str) -> None:
    assert_unchanged(load_preset(preset).model_dump(mode="json"))


def assert_unchanged(values: dict[str, object]) -> None:
    for setting in forms.settings_of(SCHEMA, values):
        assert forms.parse(setting, forms.widget_value(setting, setting.value)) == setting.value, setting.path


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *(("evaluation.stop", stop) for stop in (["\n\n", "Q:"], ["Q:", "1"], ["</answer>, "], ["true", "inf", ";"])),
        ("data.system_prompt", "Think.\n"),
        ("data.template", "{problem}\n"),
        ("evaluation.template", "Q: {problem}\nA: "),
        ("data.split", ""),
        ("name", '"Best" of three'),
        ("data.levels", [3]),
        ("placement.colocate", True),
        ("rollout.enforce_eager", False),
        ("model.gradient_checkpointing", True),
    ],
)
def test_any_value_is_shown_on_one_line_that_means_it_and_comes_by_a_link(path: str, value: object) -> None:
    setting = settings()[path]
    shown = forms.widget_value(setting, value)
    assert shown.isprintable(), "a browser takes line breaks out of a field"
    assert forms.parse(setting, shown) == value
    assert forms.of_link(forms.in_link({path: value}), settings()) == ({path: value}, [])


@pytest.mark.parametrize(
    ("path", "typed", "value"),
    [
        ("evaluation.stop", "Q:, 1", ["Q:", "1"]),
        ("evaluation.stop", '["\\n", "a, b"]', ["\n", "a, b"]),
        ("data.levels", "3, 4", [3, 4]),
        ("placement.colocate", "true", True),
        ("placement.colocate", "auto", "auto"),
        ("learner.token_budget", "4096", 4096),
    ],
)
def test_what_is_typed_has_the_type_of_its_setting_and_is_shown_again(path: str, typed: str, value: object) -> None:
    setting = settings()[path]
    parsed = forms.parse(setting, typed)
    assert (parsed, type(parsed)) == (value, type(value))
    assert forms.widget_value(setting, parsed) == typed


def test_empty_means_none_only_where_it_may_and_what_is_no_value_is_named() -> None:
    assert forms.parse(settings()["budget.backward_passes"], " ") is None
    with pytest.raises(forms.BadValue, match=r"learner\.rule\.k must have a value"):
        forms.parse(settings()["learner.rule.k"], "")
    with pytest.raises(forms.BadValue, match=r"learner\.rule\.k = 'five' is not an integer"):
        forms.parse(settings()["learner.rule.k"], "five")
    for path, typed in {
        "name": '"a" and b',
        "data.split": '"\\ud800"',
        "evaluation.stop": '["a"',
        "verifier.rewards": "[" * 100_000,
    }.items():
        with pytest.raises(forms.BadValue, match=path):
            forms.parse(settings()[path], typed)


def test_infinity_can_be_sent() -> None:
    typed = {"learner.rule.gate.threshold": "inf", "learner.rule.ratio_clip": "[0.5, Infinity]"}
    body = forms.changed(
        config(), {path: forms.parse(settings()[path], text) for path, text in typed.items()}, settings()
    )
    sent = json.loads(json.dumps(body, allow_nan=False))
    rule = RunConfig.model_validate(sent).learner.rule
    assert (rule.gate.threshold, sent["learner"]["rule"]["ratio_clip"]) == (math.inf, [0.5, "Infinity"])


def test_other_data_are_not_measured_on_the_embedded_task_that_they_replace() -> None:
    def benchmarks(changes: dict[str, object], *, of: list[str]) -> tuple[str, ...]:
        values = config() | {"evaluation": config()["evaluation"] | {"benchmarks": of}}
        return RunConfig.model_validate(forms.changed(values, changes, settings())).evaluation.benchmarks

    mine = {"data.source": "mine.jsonl"}
    assert benchmarks(mine, of=["word_problems"]) == ()
    assert benchmarks({"data.source": "arithmetic_skill"}, of=["word_problems"]) == ("arithmetic_skill",)
    assert benchmarks(mine | {"evaluation.benchmarks": ["word_problems"]}, of=["word_problems"]) == ("word_problems",)
    assert benchmarks(mine, of=["math500"]) == ("math500",)


def test_another_variant_keeps_what_was_set_of_the_settings_that_all_have() -> None:
    def loss(surrogate: str, **members: object) -> tuple[dict[str, object], dict[str, forms.Setting]]:
        given = {"learner": {"loss": {"surrogate": surrogate, **members}}}
        values = RunConfig.model_validate(given).model_dump(mode="json")
        return values, {setting.path: setting for setting in forms.settings_of(SCHEMA, values)}

    def changed(name: str, values: dict[str, object], by_path: dict[str, forms.Setting]) -> dict[str, object]:
        result = forms.changed(values, {"learner.loss.surrogate": name}, by_path)
        RunConfig.model_validate(result)
        return result["learner"]["loss"]

    masked = loss("dppo", divergence="kl", kl_beta=0.01)
    assert changed("ppo", *masked) == {"surrogate": "ppo", "kl_beta": 0.01}
    assert changed("dppo", *masked) == masked[0]["learner"]["loss"]
    clipped = loss("ppo", clip_high=0.28)
    assert changed("dppo", *clipped) == {"surrogate": "dppo", "clip_high": 0.28}
    assert changed("gspo", *clipped) == clipped[0]["learner"]["loss"] | {"surrogate": "gspo"}, "the same settings"
    agent = RunConfig.model_validate({"environment": {"name": "agent", "command": ["a"], "max_turns": 3}})
    values = agent.model_dump(mode="json")
    by_path = {setting.path: setting for setting in forms.settings_of(SCHEMA, values)}
    result = forms.changed(values, {"environment.name": "calculator"}, by_path)
    assert result["environment"] == {"name": "calculator", "max_turns": 3}
    assert by_path["environment.name"].options == ("agent", "calculator", "openenv", "single_turn")
    assert settings()["environment.name"].kind == "text", "an installed one or a class has another name"
    inputs = {
        name: {forms.key("demo", by_path[f"learner.loss.{member}"]) for member in ("surrogate", "clip_low")}
        for name, (_, by_path) in {"ppo": clipped, "gspo": loss("gspo"), "dppo": masked}.items()
    }
    assert inputs["ppo"] == inputs["gspo"]
    assert len(inputs["ppo"] & inputs["dppo"]) == 1, "the choice alone is one input"


def test_settings_of_every_variant_are_known() -> None:
    paths = set(forms.all_paths(SCHEMA))
    assert {"learner.loss.divergence", "environment.command", "learner.rule.gate.threshold"} <= paths
    assert set(settings()) | set(settings("sfpo")) <= paths


def test_a_link_has_the_changed_settings() -> None:
    changes = {
        "name": "a = b",
        "learner.rule.k": 7,
        "learner.rule.gate.threshold": "Infinity",
        "model.trust_remote_code": True,
        "budget.steps": None,
        "learner.rule.ratio_clip": [0.5, 2.0],
        "data.difficulty": ["easy"],
        "evaluation.benchmarks": [],
    }
    words = forms.in_link(changes)
    assert words[:2] == ['name="a = b"', "learner.rule.k=7"]
    assert forms.of_link(words, settings()) == (changes, [])


@pytest.mark.parametrize(
    "word",
    [
        "learner.rule.dpeth=7",
        "learner.rule.k",
        "learner.rule.k=seven",
        "learner.rule.k=[7]",
        'learner.precision="fp7"',
        'data.difficulty=["none"]',
        'evaluation.benchmarks="gsm8k"',
        'name="\\ud800"',
        'evaluation.stop=["\\ud800"]',
    ],
)
def test_words_of_a_link_that_fit_no_setting_are_named(word: str) -> None:
    assert forms.of_link([word, "learner.rule.k=7"], settings()) == ({"learner.rule.k": 7}, [word])


def test_a_link_brings_no_number_that_json_cannot_send() -> None:
    words = ["learner.rule.alpha=NaN", "learner.rule.gate.threshold=1e999", "learner.rule.ratio_clip=[0.5,Infinity]"]
    changes, others = forms.of_link([*words, "learner.lora=" + "[" * 100_000], settings())
    json.dumps(changes, allow_nan=False)
    assert list(changes.values()) == ["NaN", "Infinity", [0.5, "Infinity"]]
    assert len(others) == 1


def test_several_values_of_a_number_are_an_axis_of_a_sweep() -> None:
    by_path = settings()
    assert forms.parse(by_path["learner.optimizer.learning_rate"], "1e-5, 2e-5;inf") == [1e-5, 2e-5, "Infinity"]
    assert forms.parse(by_path["seed"], "3,") == 3
    for typed in ("0, one", ","):
        with pytest.raises(forms.BadValue, match=f"seed = '{typed}' is not an integer"):
            forms.parse(by_path["seed"], typed)
    assert forms.parse(by_path["seed"], "0,1000, 100") == [0, 1000, 100]
    for typed in ("1,000", "5, 10,000", "100,200,300"):
        with pytest.raises(forms.BadValue, match=f"seed = '{typed}': write 1000 for a thousand, and several"):
            forms.parse(by_path["seed"], typed)
    changes = {"learner.rule.k": [3, 5], "learner.rule.alpha": 0.5, "evaluation.benchmarks": ["gsm8k", "math500"]}
    assert forms.axes(changes, by_path) == {"learner.rule.k": [3, 5]}, "a list is one value of its setting"
    assert forms.of_link(forms.in_link(changes), by_path) == (changes, [])


def test_values_of_a_list() -> None:
    assert forms.values("3, 0.5; none,true , inf,") == [3, 0.5, "none", True, "Infinity"]
    assert forms.values("  ") == []


def test_curl_quotes_what_a_shell_would_read() -> None:
    command = forms.curl("http://127.0.0.1:8000/", "/runs", {"config": {"name": "it's $HOME"}})
    for words in ("it'\\''s $HOME", "http://127.0.0.1:8000/api/v1/runs ", "$GXPO_TOKEN"):
        assert words in command


# One hue a rule, readable on both pages.


PAGES = {"light": "#ffffff", "dark": "#11161d"}


def hue(color: str) -> float:
    return colorsys.rgb_to_hls(*(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)))[0]


@pytest.mark.parametrize("color", HUES)
def test_variants_of_a_rule_differ_and_are_seen_on_both_pages_and_three_keep_its_hue(color: str) -> None:
    variants = [shade(color, variant) for variant in range(20)]
    assert len(set(variants)) == 20
    for number, variant in enumerate(variants):
        assert min(contrast(variant, page) for page in PAGES.values()) >= (3 if number < 3 else 2.95)
        assert number >= 3 or hue(variant) == pytest.approx(hue(color), abs=0.02)


def test_red_is_that_of_failures_and_in_no_chart() -> None:
    file = Path(gxpo_dashboard.__file__).with_name(".streamlit") / "config.toml"
    theme = tomllib.loads(file.read_text(encoding="utf-8"))["theme"]
    for color in (*HUES, *(color for page in PAGES for color in theme[page]["chartCategoricalColors"])):
        assert min(hue(color), 1 - hue(color)) > 0.03, color


def test_variants_of_a_rule_are_shades_of_its_hue_and_rules_have_their_own() -> None:
    rules = rules_of(RunConfig.model_json_schema())
    colors = rules.colors({"GRPO": "grpo", "GRPO lr 6e-05": "grpo", "GXPO K=5": "gxpo", "GXPO K=10": "gxpo"})
    assert len(set(colors.values())) == 4
    assert colors["GRPO"] == rules.baseline.color == rules.of({"name": "grpo"}).color
    assert hue(colors["GXPO K=10"]) == pytest.approx(hue(colors["GXPO K=5"]), abs=0.02)
    assert abs(hue(colors["GXPO K=5"]) - hue(colors["GRPO"])) > 0.05
