"""RunConfig: what is refused, and with which words, and what is documented."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.bounds import unbounded

from docs_build.settings import render_page, undescribed
from gxpo_trainer.config import GxpoRule, RunConfig, Settings
from gxpo_trainer.config.engines import choose_transport
from gxpo_trainer.config.io import build
from gxpo_trainer.config.tasks import AgentConfig
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.studies.definition import Study


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        build({"learner": {"rule": {"name": "gxpo"}}}, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        # One of each kind of bound; all bounds are in docs/configuration.md, which is generated.
        ("learner.rule.k=1", "learner.rule.k = 1: must be at least 2"),
        ("learner.rule.alpha=1.5", "learner.rule.alpha = 1.5: must be at most 1"),
        ("budget.steps=0", "budget: steps = 0 leaves nothing to train; set it above 0"),
        ("budget.steps=none", "budget: no bound is set; set one of steps, backward_passes, hours, tokens"),
        ("learner.precision=bf16", 'learner: precision = "bf16" with zero_stage = 0'),
        ("learner.zero_stage=4", "learner.zero_stage = 4: must be 0, 1, 2 or 3"),
        ("learner.rule.probes=1", 'learner.rule: probes = 1 has no second gradient; set predictor = "replay"'),
        ("learner.rule.probe_state=fast_forward", "needs predictor"),
        ("learner.rule.ratio_clip=[3, -2]", "learner.rule: ratio_clip = [3.0, -2.0] is empty"),
        ("learner.rule.gate.threshold=nan", "learner.rule.gate: threshold is NaN"),
        ("learner.rule.gate={mode='rearm',rearm_threshold=nan}", "rearm_threshold must be below threshold"),
        ("learner.rule.gate={mode='rearm',threshold=1,rearm_threshold=1}", "rearm_threshold must be below threshold"),
        (
            "learner.rule.gate={mode='rearm',two_sided=true}",
            "rearm_threshold = 0 with two_sided = true: |z| is never below it",
        ),
        ("learner.lora.dropout=0.1", "learner.lora.dropout = 0.1: must be 0"),
        ("learner.lora.alpha=inf", "learner.lora.alpha = inf: must be a finite number"),
        ("learner.optimizer.betas=[0.9,1]", "learner.optimizer.betas[1] = 1: must be below 1"),
        ("learner.optimizer.betas=[-0.1,0.9]", "learner.optimizer.betas[0] = -0.1: must be at least 0"),
        ("learner.optimizer.betas=[nan,0.9]", "learner.optimizer.betas[0] = nan: must be"),
        ("verifier.deadline_s=inf", "verifier.deadline_s = inf: must be at most 1000000"),
        ("environment.deadline_s=1e10", "environment.deadline_s = 10000000000.0: must be at most 1000000"),
        ("placement.wait_s=inf", "placement.wait_s = inf: must be at most 1000000"),
        ("rollout.top_p=0.9", "rollout.top_p = 0.9: must be 1.0"),
        ("rollout.update_in_flight=true", "rollout: update_in_flight = true with async_depth = 0"),
        ("learner.loss.importance_low=3", "importance_low = 3.0 exceeds importance_high = 2.0; lower the first"),
        ("learner.optimizer.learning_rate=inf", "learner.optimizer.learning_rate = inf: must be a finite number"),
        ("rollout.max_new_tokens=4096", "rollout.max_new_tokens = 4096 leaves no room for a prompt"),
        ("data.answer_field=none", "verifier.rewards: correctness compares with a final answer, and data.answer_field"),
        ("evaluation.top_p=0", "evaluation.top_p = 0: must be above 0"),
        ("learner.mini_batches=65", "learner.mini_batches = 65 exceeds rollout.prompts_per_step = 64"),
        ("placement.colocate=true rollout.async_depth=1", "rollout.async_depth = 1 samples while the learner updates"),
        (
            "rollout.update_in_flight=true rollout.deterministic=true rollout.async_depth=1",
            "the token at which weights change depends",
        ),
        ('environment.name=calculator evaluation.stop=["Q:"]', "evaluation.stop cannot end turns"),
        ("rollout.source=dataset warm_start.steps=1", 'warm_start has no meaning with rollout.source = "dataset"; '),
        ("rollout.source=dataset rollout.async_depth=1", "rollout.async_depth has no meaning with rollout.source = "),
        ("rollout.source=dataset learner.loss.kl_beta=0.1", "learner.loss.kl_beta has no meaning with rollout.source"),
        ("warm_start.steps=1 learner.loss.kl_beta=0.01", "before warm_start; set it to 0, or train from a checkpoint"),
        ("logging.trackers=['wandb','wandb']", "a tracker is listed twice; remove one"),
        ("logging.trackers=[{name='mlflow',address='http://me:x@host'}]", "has credentials or a query; keys are read"),
        (
            "logging.trackers=[{name='trackio',address='http://host?key=x'}]",
            "has credentials or a query; keys are read",
        ),
        ("logging.trackers=[{name='wandb',address='host'}]", "address = 'host' must look like https://host:port"),
        ("logging.trackers=[{name='tensorboard',address='http://h'}]", "tensorboard writes into the run's folder; re"),
        ("environment.name=openenv", "needs an address"),
        ("environment.name=calculator environment.url=http://127.0.0.1:1", "only openenv has an address"),
        ("environment.name=openenv environment.url=http://me:word@127.0.0.1:1", "without a user name or password"),
        ("environment.name=openenv environment.url=file:///etc/passwd", "http://host:port"),
        ("environment.name=agent", "set one of command, function and url"),
        ('environment.name=agent environment.command=["x"] environment.function=a:b', "set one of command, function"),
        (
            "placement.colocate=true placement.learner_ranks=3 placement.samplers=2",
            "learner_ranks = 3 and samplers × tensor_parallel = 2; make them equal, or set colocate = false",
        ),
        (
            "placement.colocate=true placement.learner_ranks=2 placement.samplers=2 placement.strategy=split",
            'strategy = "split"',
        ),
        (
            "learner.sequence_parallel=4 placement.learner_ranks=6",
            "learner.sequence_parallel = 4 does not divide placement.learner_ranks = 6; change one of them",
        ),
        (
            "learner.sequence_parallel=2 placement.learner_ranks=6 rollout.prompts_per_step=2",
            "placement.learner_ranks exceeds the prompts of a mini-batch; lower it",
        ),
        ("placement.device=cpu placement.weight_transport=cuda_ipc", 'set device = "gpu" where GPUs join later'),
    ],
)
def test_an_impossible_setting_is_refused_by_name_with_its_value(override: str, line: str) -> None:
    assert line in refusal(*re.split(r" (?=[a-z])", override))


@pytest.mark.parametrize(
    ("setting", "value", "line"),
    [
        ("seed", True, "seed = true: must be a whole number"),
        ("seed", "1", 'seed = "1": must be a whole number'),
        ("learner.optimizer.betas", [True, 0.9], "learner.optimizer.betas[0] = true: must be a number"),
        ("data.levels", ["3"], 'data.levels[0] = "3": must be a whole number'),
        ("rollout.deterministic", 1, "rollout.deterministic = 1: must be true or false"),
        ("rollout.deterministic", "yes", 'rollout.deterministic = "yes": must be true or false'),
        ("placement.colocate", 0, 'placement.colocate = 0: must be true or false, or "auto"'),
        ("budget.steps", "Infinity", 'budget.steps = "Infinity": must be a whole number'),
    ],
)
def test_no_setting_takes_another_type_for_a_number_or_truth_value(setting: str, value: Any, line: str) -> None:
    settings: Any = value
    for key in reversed(setting.split(".")):
        settings = {key: settings}
    with pytest.raises(ConfigError) as caught:
        build(settings)
    assert str(caught.value).splitlines()[1:] == [f"  {line}"]


def test_every_bad_setting_is_listed_at_once() -> None:
    lines = refusal("seed=-1", "learner.rule.k=0", "data.levels=3", "model.max_length=two").splitlines()
    assert len(lines) == 5
    assert lines[1:] == [
        "  seed = -1: must be at least 0",
        '  model.max_length = "two": must be a whole number',
        "  data.levels = 3: must be a list in brackets",
        "  learner.rule.k = 0: must be at least 2",
    ]


def test_the_hash_covers_what_can_change_a_result() -> None:
    base = RunConfig().sha256()
    assert build({"name": "other", "timeouts": {"setup_s": 5}, "logging": {"trackers": ["mlflow"]}}).sha256() == base
    for change in ({"seed": 1}, {"evaluation": {"top_p": 0.9}}, {"verifier": {"answer": "boxed"}}):
        assert build(change).sha256() != base


def test_the_automatic_scale_clamp_is_one_to_half_k_plus_one() -> None:
    assert GxpoRule(k=5).scale_bounds == (1.0, 3.5)
    assert GxpoRule(k=10, scale_clip=(1.0, 2.0)).scale_bounds == (1.0, 2.0)
    assert GxpoRule(scale_clip="none").scale_bounds is None


def test_every_setting_has_a_description() -> None:
    assert undescribed() == []


def test_the_settings_page_has_no_row_of_a_setting_that_an_agent_refuses() -> None:
    page = render_page()
    assert [page.count(f"| `environment.{name}` |") for name in (*AgentConfig.refused, "max_turns")] == [1, 1, 1, 2]


def test_the_sections_of_the_settings_page_have_their_own_titles_and_whole_sentences() -> None:
    titles, intros = zip(*re.findall(r"^## (.*)\n\n(.*)\n\n\| setting \| values", render_page(), re.M), strict=True)
    assert len(titles) > 30
    assert sorted(set(titles)) == sorted(titles)
    assert [intro for intro in intros if not intro.endswith(".")] == []


@pytest.mark.parametrize(
    ("settings", "exceptions"),
    # The seeds of a study are those of its runs, whose configs bound them.
    [(RunConfig, set()), (Study, {"seeds[]: integer", "ladder.seeds[]: integer", "search.seeds[]: integer"})],
)
def test_every_count_text_and_list_has_an_upper_bound(settings: type[Settings], exceptions: set[str]) -> None:
    schema = settings.model_json_schema()
    assert set(unbounded(schema, schema["$defs"])) == exceptions


# How weights reach the engines: what `auto` takes and what is refused.


@pytest.mark.parametrize(
    ("requested", "device", "colocated", "one_node", "result"),
    [
        # The fastest that the placement allows.
        ("auto", "gpu", True, True, "cuda_ipc"),
        ("auto", "gpu", False, True, "nccl"),
        ("auto", "cpu", False, True, "shared_memory"),
        ("auto", "cpu", False, False, "object_store"),
        ("nccl", "gpu", False, False, "nccl"),
        ("cuda_ipc", "gpu", True, True, "cuda_ipc"),
        ("shared_memory", "gpu", True, True, "shared_memory"),
        ("object_store", "gpu", False, False, "object_store"),
        # Or why it cannot work.
        ("nccl", "cpu", False, True, "needs GPUs"),
        ("cuda_ipc", "cpu", True, True, "needs GPUs"),
        ("nccl", "gpu", True, True, "rejects duplicate devices"),
        ("cuda_ipc", "gpu", False, True, "on the same GPUs"),
        ("shared_memory", "cpu", False, False, "on different nodes"),
        ("shared_memory", "gpu", True, False, "on different nodes"),
    ],
)
def test_the_transport_of_a_placement(
    requested: Any, device: Any, colocated: bool, one_node: bool, result: str
) -> None:
    if " " not in result:
        assert choose_transport(requested, device, colocated, one_node) == result
        return
    with pytest.raises(ValueError, match=f'weight_transport = "{requested}" .*{result}.*or weight_transport = "auto"'):
        choose_transport(requested, device, colocated, one_node)


@pytest.mark.parametrize(
    ("settings", "benchmarks"),
    [
        ({}, ("word_problems",)),
        ({"data": {"source": "arithmetic_skill"}}, ("arithmetic_skill",)),
        ({"data": {"source": "mine.jsonl"}}, ()),
        ({"data": {"source": "mine.jsonl"}, "evaluation": {"every_steps": 5}}, ()),
        ({"data": {"source": "mine.jsonl"}, "evaluation": {"benchmarks": ["math500"]}}, ("math500",)),
        ({"data": {"sources": [{"path": "mine.jsonl"}, {"path": "other.csv"}]}}, ()),
        ({"data": {"sources": [{"path": "mine.jsonl"}, {"path": "arithmetic_skill"}]}}, ("arithmetic_skill",)),
    ],
)
def test_a_run_is_measured_on_nothing_that_its_data_have_nothing_to_do_with(
    settings: dict[str, Any], benchmarks: tuple[str, ...]
) -> None:
    config = RunConfig.model_validate(settings)
    assert config.evaluation.benchmarks == benchmarks
    assert build(settings, ["evaluation.every_steps=20"]).evaluation.benchmarks == benchmarks
    assert RunConfig.model_validate(config.model_dump()) == config
