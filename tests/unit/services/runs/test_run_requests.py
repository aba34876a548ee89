"""From a request to a config: three forms of one config, and every bad setting by its path."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from gxpo_services.api.errors import Invalid
from gxpo_services.runs.configs import RunSource, checked, settings_of, stored
from gxpo_services.runs.plan import expected_cost, resources
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
    wanted = load_preset(name, ["budget.hours=inf"])
    assert config_of(preset=name, overrides=["budget.hours=inf"]) == wanted
    assert config_of(toml=to_toml(wanted)) == config_of(toml="\ufeff" + to_toml(wanted)) == wanted
    assert config_of(config=json.loads(json.dumps(stored(wanted), allow_nan=False))) == wanted


def test_every_bad_setting_is_named_together_with_what_this_server_refuses() -> None:
    body = {
        "learner": {"rule": {"name": "gxpo", "k": 1, "alhpa": 0.5}, "loss": {"aggregation": "mean"}},
        "placement": {"ray_address": "auto"},
        "data": {"subset": "../x"},
        "budget": {"steps": 0},
    }
    errors = errors_of(config=body)
    paths = "learner.rule.k learner.rule.alhpa learner.loss.aggregation placement.ray_address data.subset budget"
    assert errors.keys() == {f"config.{path}" for path in paths.split()}
    assert errors["config.learner.rule.k"].startswith("must be at least 2")
    assert "did you mean learner.rule.alpha?" in errors["config.learner.rule.alhpa"]


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


@pytest.mark.parametrize("source", [{}, {"preset": "demo", "config": {}}, {"toml": "", "config": {}}])
def test_exactly_one_form_is_given(source: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="one of config, toml and preset is required"):
        RunSource.model_validate(source)


# What a config costs, worked by hand; the plan that `/runs/validate` adds; and what is refused.


UNKNOWN, SMALL, LARGE = ServiceSettings(), ServiceSettings(gpu="a10g-24"), ServiceSettings(gpu="H100-80")


def accepted(server: ServiceSettings, *overrides: str) -> RunConfig:
    source = RunSource.model_validate({"preset": "paper-3b", "overrides": list(overrides)})
    return checked(settings_of(source), server)


def test_a_run_that_cannot_fit_is_refused_with_the_planners_sentence() -> None:
    with pytest.raises(Invalid) as caught:
        accepted(SMALL)
    (error,) = caught.value.errors
    assert error.field == "config.placement"
    assert "GiB per device and a10g-24 has 22.5 GiB; set " in error.message
    accepted(LARGE)
    accepted(UNKNOWN)  # not known, so nothing is refused
    accepted(SMALL, "placement.device=cpu", "model.path=starter")
    accepted(SMALL, "model.path=org/model")


@pytest.mark.parametrize(
    ("quotas", "words"),
    [
        # Four ranks of 1 CPU, four engines of 0.75 and the verifier's 0.25, on four shared GPUs.
        ({"quota_gpus": 3}, "needs 4 GPUs, and all runs together may use 3 (GXPO_QUOTA_GPUS)"),
        ({"quota_cpus": 7}, "needs 7.25 CPUs, and all runs together may use 7 (GXPO_QUOTA_CPUS)"),
    ],
)
def test_a_run_above_a_quota_is_refused_at_once(quotas: dict[str, float], words: str) -> None:
    with pytest.raises(Invalid) as caught:
        accepted(ServiceSettings.model_validate(quotas))
    (error,) = caught.value.errors
    assert error.field == "config.placement"
    assert error.message.startswith(words)
    accepted(ServiceSettings(quota_cpus=7.25, quota_gpus=4))
    accepted(ServiceSettings(quota_gpus=0), "placement.device=auto")  # runs on CPUs there


def config(rule: dict[str, Any] | None = None, **budget: float) -> RunConfig:
    learner = {} if rule is None else {"learner": {"rule": rule}}
    return RunConfig.model_validate({**learner, "budget": budget or {"steps": 40}})


def test_the_budget_in_passes_caps_them_and_is_named() -> None:
    gxpo = expected_cost(config({"name": "gxpo"}, steps=40, backward_passes=100))
    assert (gxpo.steps, gxpo.backward_passes) == (40, 100)
    assert "budget.backward_passes = 100 ends the run" in gxpo.per_step_words
    loose = expected_cost(config({"name": "gxpo"}, steps=40, backward_passes=121))
    assert loose.backward_passes == 120
    assert "budget" not in loose.per_step_words
    # Passes alone bound the steps of GRPO.
    assert expected_cost(config({"name": "grpo"}, backward_passes=50)).steps == 50
    assert expected_cost(config({"name": "gxpo"}, backward_passes=50)).steps is None


def test_logical_cpus_and_gpus_of_a_run() -> None:
    placement = {"learner_ranks": 4, "learner_cpus": 1.5, "sampler_cpus": 0.75, "verifier_cpus": 0.25}
    gpus = placement | {"device": "gpu", "tensor_parallel": 2}
    for given, held in (
        (placement | {"device": "cpu"}, (7.0, 0.0)),
        (placement, (7.0, 5.0)),  # four ranks and an engine, where there are GPUs
        (gpus, (7.0, 6.0)),
        # Two engines on two GPUs each: with the learner's four ranks on the same four, or on eight.
        (gpus | {"samplers": 2}, (7.75, 4.0)),
        (gpus | {"samplers": 2, "colocate": False}, (7.75, 8.0)),
        ({"samplers": 2, "device": "cpu"}, (2.75, 0.0)),
    ):
        assert resources(RunConfig.model_validate({"placement": given})) == held
