"""From a request to a config: three forms of one config, and every bad setting by its path."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from pydantic import ValidationError

from gxpo_services.api.errors import FieldError, Invalid
from gxpo_services.api.fields import faults
from gxpo_services.runs.configs import RunSource, checked, invalid, overridden, settings_of, stored
from gxpo_services.settings import ServiceSettings
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import load_preset, preset_names, to_toml

SERVER = ServiceSettings()


def config_of(**source: Any) -> RunConfig:
    return checked(settings_of(RunSource.model_validate(source)), SERVER)


def errors_of(**source: Any) -> dict[str, str]:
    with pytest.raises(Invalid) as caught:
        config_of(**source)
    return {error.field: error.message for error in caught.value.errors}


@pytest.mark.parametrize("name", preset_names())
def test_preset_toml_and_nested_settings_are_three_forms_of_one_config(name: str) -> None:
    wanted = load_preset(name)
    assert config_of(preset=name) == wanted
    assert config_of(toml=to_toml(wanted)) == wanted
    assert config_of(config=json.loads(json.dumps(stored(wanted)))) == wanted


def test_a_stored_config_comes_back_equal_infinities_included() -> None:
    values = {"learner": {"rule": {"name": "gxpo", "gate": {"threshold": math.inf}}}, "budget": {"hours": math.inf}}
    wanted = RunConfig.model_validate(values)
    text = json.dumps(stored(wanted), allow_nan=False)
    assert RunConfig.model_validate(json.loads(text)) == wanted
    assert RunConfig.model_validate(json.loads(text)).sha256() == wanted.sha256()


def test_overrides_are_put_into_any_form() -> None:
    for source in ({"preset": "demo"}, {"toml": to_toml(load_preset("demo"))}, {"config": stored(load_preset("demo"))}):
        config = config_of(**source, overrides=["learner.rule.k=10", "seed=3", "learner.rule.gate.threshold=inf"])
        assert config == load_preset("demo", ["learner.rule.k=10", "seed=3", "learner.rule.gate.threshold=inf"])
        assert config_of(**source, overrides=["learner.rule.name=sfpo"]).learner.rule.name == "sfpo"


def test_every_bad_setting_is_named_together_with_what_this_server_refuses() -> None:
    body = {
        "learner": {"rule": {"name": "gxpo", "k": 1, "alhpa": 0.5}, "loss": {"aggregation": "mean"}},
        "placement": {"ray_address": "auto"},
        "data": {"subset": "../x"},
        "budget": {"steps": 0},
    }
    errors = errors_of(config=body)
    assert errors.keys() == {
        "config.learner.rule.k",
        "config.learner.rule.alhpa",
        "config.learner.loss.aggregation",
        "config.placement.ray_address",
        "config.data.subset",
        "config.budget",
    }
    assert errors["config.learner.rule.k"].startswith("must be at least 2")
    assert "did you mean learner.rule.alpha?" in errors["config.learner.rule.alhpa"]


@pytest.mark.parametrize(
    ("names", "text"),
    [("a", "a: x"), ("edcba", "a: x; b: x; c: x; d: x; e: x"), ("fedcba", "a: x; b: x; c: x; d: x; e: x; …")],
)
def test_the_text_names_up_to_five_settings_and_the_errors_all(names: str, text: str) -> None:
    refusal = invalid([FieldError(field=name, message="x") for name in names])
    assert str(refusal) == text
    assert [error.field for error in refusal.errors] == sorted(names)


def test_what_no_single_setting_is_to_blame_for_is_an_error_of_the_config() -> None:
    errors = errors_of(config={"rollout": {"max_new_tokens": 5000}})
    assert "rollout.max_new_tokens = 5000 leaves no room" in errors["config"]


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ({"preset": "none-such"}, "preset"),
        ({"toml": "x = "}, "toml"),
        ({"toml": "x = " + "[" * 5000}, "toml"),
        ({"toml": "seed = " + "9" * 5000}, "toml"),
        ({"config": {}, "overrides": ["seed=1", "no equals"]}, "overrides[1]"),
        ({"config": {}, "overrides": ["seeed=1"]}, "overrides[0]"),
        ({"config": {}, "overrides": ["data.split=" + "[" * 1900]}, "overrides[0]"),
        ({"config": {}, "overrides": ['data.split="a\\u0000b"']}, "overrides[0]"),
        ({"config": {"seed": 2**63}}, "config.seed"),
        ({"config": {"data": {"split": "a\x00"}}}, "config.data.split"),
        ({"config": {"data": {"split": "\ud800"}}}, "config.data.split"),
        ({"config": {"\ud800": 1}}, "config"),
        ({"config": {"model": {"path": "/" + "x" * 400}}}, "config.model.path"),
        ({"config": {"placement": {"learner_cpus": 1e308, "learner_ranks": 64}}}, "config.placement.learner_cpus"),
        ({"config": {"placement": {"samplers": 20_000_000}}}, "config.placement.samplers"),
        ({"config": {"verifier": {"rewards": [{"name": "format"}] * 2000}}}, "config.verifier.rewards"),
        ({"config": {"evaluation": {"benchmarks": ["a.jsonl"] * 2000}}}, "config.evaluation.benchmarks"),
        ({"toml": 'name = "a\\u0000"'}, "config.name"),
    ],
)
def test_what_cannot_be_read_or_stored_is_refused_by_its_name(source: dict[str, Any], field: str) -> None:
    assert errors_of(**source).keys() == {field}


def test_deep_nesting_is_refused_before_it_can_exhaust_the_stack() -> None:
    value: Any = 1
    for _ in range(400):
        value = {"a": value}
    assert "nested deeper" in next(iter(errors_of(config={"data": value}).values()))


@pytest.mark.parametrize("source", [{}, {"preset": "demo", "config": {}}, {"toml": "", "config": {}}])
def test_exactly_one_form_is_given(source: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="one of config, toml and preset is required"):
        RunSource.model_validate(source)


def test_faults_are_found_at_their_paths() -> None:
    value = {"a": ["x", {"b": "\x00"}], "c": 2**63, "d": -(2**70), "e": True, "f": 2**63 - 1}
    assert [path for path, _ in faults(value)] == ["a[1].b", "c", "d"]


def test_overrides_do_not_change_what_they_are_put_into() -> None:
    values = stored(load_preset("demo"))
    before = json.dumps(values)
    assert overridden(values, ["seed=9"], "overrides")["seed"] == 9
    assert json.dumps(values) == before
