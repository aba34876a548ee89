"""Files, overrides and presets: what goes in comes out, and the paper's numbers are the paper's."""

from __future__ import annotations

import json
import math
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from gxpo_trainer.config import GrpoRule, GxpoRule, LoraConfig, RunConfig, SfpoRule
from gxpo_trainer.config.io import (
    build,
    learning_rate_control,
    load_preset,
    load_run,
    parse_override,
    preset_names,
    preset_texts,
    to_toml,
    toml_value,
)
from gxpo_trainer.config.messages import OTHER_NAMES, setting_paths
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.jsonl import plain

PAPER = {
    "paper-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "paper-3b": "Qwen/Qwen2.5-3B-Instruct",
    "paper-7b-lora": "Qwen/Qwen2.5-7B-Instruct",
    "paper-llama-3b": "meta-llama/Llama-3.2-3B-Instruct",
}


def as_json(config: RunConfig) -> str:
    """As the API answers: infinities are texts."""
    return json.dumps(plain(config.model_dump()))


@pytest.mark.parametrize("name", [*preset_names(), "data sources"])
def test_every_preset_and_lists_of_settings_survive_a_file_exactly(name: str, tmp_path: Path) -> None:
    sources = [{"path": "a.jsonl", "weight": 3}, {"path": "b.csv", "answer_field": None, "rewards": ["format"]}]
    listed = {"data": {"sources": sources}, "verifier": {"rewards": [{}, {"name": "format"}]}}
    config = load_preset(name) if name in preset_names() else build(listed)
    for file, text in (("run.toml", to_toml(config, ["head"])), ("run.json", as_json(config))):
        (tmp_path / file).write_text(text, encoding="utf-8")
        assert load_run(tmp_path / file) == config
        assert load_run(tmp_path / file).sha256() == config.sha256()


def test_a_preset_with_data_of_its_users_is_not_measured_on_the_embedded_task() -> None:
    for name in preset_names():
        own, other = load_preset(name), load_preset(name, ["data.source=mine.jsonl"])
        assert other.evaluation.benchmarks == (() if own.data.embedded else own.evaluation.benchmarks), name


floats = st.floats(min_value=1e-12, max_value=1e6)


@settings(max_examples=60, deadline=None)
@given(
    threshold=st.one_of(st.just(math.inf), st.just(-math.inf), st.floats(-5, 5)),
    rate=floats,
    num_problems=st.one_of(st.none(), st.integers(1, 10_000)),
    lora=st.one_of(st.none(), st.builds(LoraConfig, rank=st.integers(1, 512))),
    clip=st.sampled_from(["none", "auto", (0.5, 2.0)]),
    name=st.text(min_size=1, max_size=50),
    hours=st.one_of(st.none(), floats),
)
def test_any_valid_config_survives_toml_exactly(threshold, rate, num_problems, lora, clip, name, hours) -> None:
    rule = {"name": "gxpo", "scale_clip": clip, "gate": {"threshold": threshold}}
    learner = {"rule": rule, "optimizer": {"learning_rate": rate}, "lora": lora and lora.model_dump()}
    others = {"evaluation": {"num_problems": num_problems}, "budget": {"steps": 3, "hours": hours}}
    config = build({"name": name, "learner": learner, **others})
    assert build(tomllib.loads(to_toml(config))) == config
    assert build(json.loads(as_json(config))) == config


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("run.toml", "seed = ", "is not valid TOML"),
        ("run.json", '{"seed": 1', "is not valid JSON"),
        ("run.json", "[1]", "contains a list"),
        ("run.yaml", "seed: 1", "has the suffix '.yaml'"),
        ("run.toml", "a = " + 5000 * "[", "is not valid TOML: maximum recursion depth"),
        ("run.json", 100_000 * "[", "is not valid JSON: maximum recursion depth"),
        ("run.toml", None, "does not exist; `gxpo config --preset demo"),
    ],
)
def test_an_unreadable_file_is_refused_by_name(file: str, text: str | None, words: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / file).write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"{file} {words}")):
        load_run(tmp_path / file)


@pytest.mark.parametrize(("file", "text"), [("run.toml", "seed = 7"), ("run.json", '{"seed": 7}')])
def test_a_byte_order_mark_is_no_part_of_a_file(file: str, text: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(text, encoding="utf-8-sig")
    assert load_run(tmp_path / file).seed == 7


def test_every_name_of_another_library_stands_for_a_setting() -> None:
    every = [name for names, _, _ in OTHER_NAMES for name in names.split(", ")]
    assert len(set(every)) == len(every)
    assert {setting for _, setting, _ in OTHER_NAMES} <= set(setting_paths())
    assert not set(every) & set(setting_paths())


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("learner.rule.kk", "learner.rule.k"),
        ("learner.optimiser.learning_rate", "learner.optimizer.learning_rate"),
        ("learning_rate", "learner.optimizer.learning_rate"),
        ("rollout.sample_per_prompt", "rollout.samples_per_prompt"),
        ("learner.optimizer.lr", "learner.optimizer.learning_rate"),
        ("actor_rollout_ref.actor.optim.lr", "learner.optimizer.learning_rate"),
        ("num_generations", "rollout.samples_per_prompt"),
        ("per_device_train_batch_size", "rollout.prompts_per_step (prompts of all ranks, not samples)"),
        ("learner.loss.beta", "learner.loss.kl_beta (0 is without)"),
        ("learner.loss.epsilon", "learner.loss.clip_low (and learner.loss.clip_high)"),
    ],
)
def test_a_mistyped_setting_is_refused_and_the_nearest_named(wrong: str, near: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"did you mean {near}?")):
        build({}, [f"{wrong}=1"])
    settings: dict = {"name": "gxpo"} if wrong.startswith("learner.rule") else {}
    *sections, last = wrong.split(".")
    settings[last] = 1
    for section in reversed(sections):
        settings = {section: settings}
    with pytest.raises(ConfigError, match="unknown setting"):
        build(settings)


def test_a_mistyped_setting_in_a_list_is_compared_with_those_of_its_entries() -> None:
    with pytest.raises(
        ConfigError, match=r"verifier.rewards\[0\].wieght = 2: .* did you mean verifier.rewards.weight\?"
    ):
        build({"verifier": {"rewards": [{"name": "correctness", "wieght": 2}]}})


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        ({"name": "grpo", "k": 5}, ".k = 5: is not a setting of the selected rule"),
        ({"k": 5}, ".name: is missing; set it to"),
        ({"name": "ppo"}, '.name = "ppo": must be one of "grpo", "sfpo", "gxpo"'),
    ],
)
def test_a_rule_is_named_and_has_its_own_settings(rule: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"learner.rule{complaint}")):
        build({"learner": {"rule": rule}})


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("learner.rule.k=7", 7),
        ("learner.rule.gate.threshold=inf", math.inf),
        ("data.levels=[3, 4, 5]", (3, 4, 5)),
        ("data.source=my/data.jsonl", "my/data.jsonl"),
        ("rollout.deterministic=true", True),
        ('name="7"', "7"),
        ("budget.steps=1e5", 100_000),
    ],
)
def test_an_override_is_a_toml_value_or_a_bare_word(override: str, value: object) -> None:
    result: object = build({}, [override])
    for key in override.partition("=")[0].split("."):
        result = getattr(result, key)
    assert result == value


@pytest.mark.parametrize(
    "value", [{"rank": 4}, [{"path": "x" * 90}, {"path": "y" * 90, "r": ["a"]}], [], "a\n'\"b", True, 1e-5, [1, 2]]
)
def test_a_value_survives_an_override(value: object) -> None:
    """Tables become sections in TOML, and long ones in a list too, which no override can hold."""
    assert parse_override(f"a.b={toml_value(value)}") == ("a.b", value)


def test_an_override_keeps_the_other_defaults_of_its_section() -> None:
    assert build({}, ["budget.hours=1.0"]).budget.steps == RunConfig().budget.steps
    assert build({}, ["budget.hours=1.0", "budget.steps=none"]).budget.steps is None
    assert build({"learner": {"lora": {"rank": 4}}}, ["learner.lora=none"]).learner.lora is None
    assert build({}, ["name=1\nseed = 5"]).seed == 0, "a second setting is smuggled in"


@pytest.mark.parametrize("order", [1, -1])
def test_naming_another_rule_starts_from_its_defaults_in_any_order(order: int) -> None:
    overrides = ["learner.rule.name=sfpo", "learner.rule.k=9"][::order]
    assert load_preset("demo", overrides).learner.rule == SfpoRule(k=9)


def test_an_override_of_a_gate_keeps_the_defaults_of_the_named_rule() -> None:
    gate, named = SfpoRule(gate={"window": 20}).gate, {"learner": {"rule": {"name": "sfpo"}}}
    assert build(named, ["learner.rule.gate.window=20"]).learner.rule.gate == gate
    assert build({}, ["learner.rule.gate.window=20", "learner.rule.name=sfpo"]).learner.rule.gate == gate
    assert build({}, ["learner.rule.gate.window=20"]).learner.rule.gate == GxpoRule(gate={"window": 20}).gate


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("learner.rule.k", "must look like"),
        ("=5", "must look like"),
        ("data.levels=[3, x]", "not valid"),
        ("data.levels=" + 5000 * "[", "not valid TOML"),
        ("verifier.rewards.weight=2", "verifier.rewards is a list and is set as a whole, in brackets"),
        ("verifier.rewards.name=format", "verifier.rewards is a list"),
        ("verifier.rewards[0].weight=2", "verifier.rewards is a list"),
        ("data.sources.0.weight=2", "data.sources is a list"),
        ("logging.trackers.name=wandb", "logging.trackers is a list"),
    ],
)
def test_an_override_that_is_no_assignment_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        build({}, [text])


def test_the_paper_s_models_have_the_same_presets_each_about_its_own_base() -> None:
    kinds = ("", "-grpo", "-grpo-lr-control", "-sfpo")
    assert [name for name in preset_names() if name.startswith("paper-")] == [f"{n}{k}" for n in PAPER for k in kinds]
    for name, text in preset_texts().items():
        assert "paper-1.5b" not in text or name.startswith("paper-1.5b") or name in PAPER


def test_an_unknown_preset_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match=r"there is no preset 'dem'; choose one of demo, demo-grpo"):
        load_preset("dem")


@pytest.mark.parametrize(("name", "model"), PAPER.items())
def test_paper_presets_hold_the_settings_of_the_paper(name: str, model: str) -> None:
    """Literal numbers of arXiv 2605.06755, section on the experimental set-up."""
    config = load_preset(name)
    assert config.model.path == model
    lora = config.learner.lora
    assert (lora is not None) == (name == "paper-7b-lora")
    if lora is not None:
        modules = ("q_proj", "k_proj", "v_proj", "o_proj")
        assert (lora.rank, lora.alpha, lora.target_modules) == (128, 256.0, modules)
    rule = config.learner.rule
    assert isinstance(rule, GxpoRule)
    assert (rule.k, rule.alpha, rule.delta, rule.predictor, rule.probe_state) == (5, 0.5, 1e-8, "gradient", "keep")
    assert (rule.ratio_clip, rule.scale_clip) == ((-2.0, 3.0), "auto")
    assert (rule.gate.threshold, rule.gate.window, rule.gate.warmup) == (0.5, 30, 90)
    assert (rule.gate.two_sided, rule.gate.mode) == (False, "permanent")
    assert config.learner.precision == "bf16"
    assert config.learner.optimizer.learning_rate == 1e-7
    assert config.learner.optimizer.max_grad_norm == 1.0
    assert (config.learner.loss.clip_low, config.learner.loss.clip_high) == (0.2, 0.2)
    assert config.learner.loss.kl_beta == 0.001
    assert (config.rollout.prompts_per_step, config.rollout.samples_per_prompt) == (128, 5)
    assert (config.rollout.max_new_tokens, config.model.max_length) == (3072, 4096)
    assert config.rollout.temperature == 1.0
    assert config.budget.model_dump(exclude_none=True) == {"steps": 300}
    assert config.data.levels == (3, 4, 5)
    assert config.evaluation.benchmarks == ("math500", "amc23", "gsm8k", "minerva_math", "olympiadbench")
    assert config.evaluation.samples_per_prompt == 16


@pytest.mark.parametrize("name", PAPER)
def test_sfpo_presets_run_as_the_gxpo_paper_ran_sfpo(name: str) -> None:
    rule = load_preset(f"{name}-sfpo").learner.rule
    assert isinstance(rule, SfpoRule)
    assert (rule.alpha, rule.gate.threshold, rule.gate.two_sided) == (0.5, 2.0, True)


@pytest.mark.parametrize("base", ["demo", *PAPER])
def test_baselines_and_controls_differ_from_their_base_in_the_rule_alone(base: str) -> None:
    """But for the demo's baseline, which has its own best rate of the ladder in the reference study."""
    config = load_preset(base)
    for name, expected in (
        (f"{base}-grpo", config.model_copy(update={"learner": config.learner.model_copy(update={"rule": GrpoRule()})})),
        (f"{base}-grpo-lr-control", learning_rate_control(config)),
    ):
        loaded, wanted = load_preset(name).model_dump(), expected.model_dump()
        rates = [dump["learner"]["optimizer"].pop("learning_rate") for dump in (loaded, wanted)]
        assert rates[0] == pytest.approx(4.8e-4 if name == "demo-grpo" else rates[1], rel=1e-12)
        assert loaded.pop("name") == name
        wanted.pop("name")
        assert loaded == wanted
