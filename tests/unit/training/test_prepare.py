"""What is checked and left out before any engine starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from support import data_files
from support.checkpointed import save_checkpoint
from support.command_line import Gxpo
from transformers import AutoTokenizer

from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import build
from gxpo_trainer.config.tasks import EnvironmentConfig
from gxpo_trainer.data.chat import rendering
from gxpo_trainer.errors import CheckpointError, ConfigError, DataError
from gxpo_trainer.learner.models import STARTER_FOLDER
from gxpo_trainer.reporting.reading import read_events
from gxpo_trainer.reporting.reporter import RunReporter
from gxpo_trainer.training.prepare import Prepared, check_tokens, load_problems, prepare
from gxpo_trainer.training.run import record_data, train_run
from gxpo_trainer.types import VerifyOptions

PROBLEM = "Anna has {} apples. She gets {} more. How many does Anna have now?"


def write(path: Path, pairs: list[tuple[int, int]]) -> str:
    rows = ({"id": f"{a}+{b}", "problem": PROBLEM.format(a, b), "answer": str(a + b)} for a, b in pairs)
    return str(data_files.write(path, *rows))


def recorded(prepared: Prepared, folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The events in a run's folder, and what is printed."""
    said: list[str] = []
    with RunReporter(folder) as reporter:
        record_data(prepared, reporter, said.append)
    return list(read_events(folder)), said


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """Three training problems, of which one is the last of three evaluated ones."""
    train = write(tmp_path / "train.jsonl", [(3, 4), (5, 6), (7, 8)])
    held_out = write(tmp_path / "held_out.jsonl", [(20, 1), (30, 2), (5, 6)])

    def made(**changes: Any) -> RunConfig:
        return build(
            {
                "data": {"source": train, "template": "plain", **changes.pop("data", {})},
                "evaluation": {"benchmarks": [held_out], **changes.pop("evaluation", {})},
                "placement": {"device": "cpu"},
                "rollout": {"prompts_per_step": 2, **changes.pop("rollout", {})},
                **changes,
            }
        )

    return made


def test_contamination_and_shares_are_checked_over_all_sources(config: Any, tmp_path: Path) -> None:
    other = write(tmp_path / "other.jsonl", [(1, 1), (30, 2)])
    data = {"source": "word_problems", "sources": [{"path": str(tmp_path / "train.jsonl")}, {"path": other}]}
    problems = load_problems(config(data=data))
    assert [prompt.id for prompt in problems.prompts.prompts] == ["train/3+4", "train/7+8", "other/1+1"]
    assert problems.data.num_left_out == {"data.contamination": 2}
    with pytest.raises(DataError, match=r"data.sources\[1\].path = .*: 1 problem for its share of 2 of 4 prompts"):
        load_problems(config(data=data, rollout={"prompts_per_step": 4}))


ASKING = """
from gxpo_trainer.environments import Observation, Turn
class Asking:
    def reset(self, problem, seed):
        return Observation.of_text("Ask. " + problem.text)
    def step(self, action):
        return Turn(done=True)
"""


def test_the_first_event_has_the_policys_prompt(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the starter's template: <|role|>content<|end|>; of an environment what its `reset` returned."""
    (tmp_path / "asking.py").write_text(ASKING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    single = config(data={"system_prompt": "Add.", "template": "Q: {problem}"})
    played = single.model_copy(update={"environment": EnvironmentConfig(name="asking:Asking")})
    for run in (single, played):
        events, _ = recorded(prepare(run, tmp_path / "new"), tmp_path / "run")
    shown = [event["message"] for event in events if event["kind"] == "prompt"]
    question = f"Q: {PROBLEM.format(3, 4)}"
    for message, first in zip(shown, (question, f"Ask. {question}"), strict=True):
        head, _, text = message.partition(":\n")
        assert head.startswith("first of 2 training prompts, ")
        assert head.endswith(" tokens, rendered with the model's chat template")
        assert text == f"<|bos|><|system|>Add.<|end|><|user|>{first}<|end|><|assistant|>"


CALLING = """
from openai import OpenAI
def play(problem):
    messages = [{"role": "user", "content": problem["text"]}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    OpenAI().chat.completions.create(model="policy", messages=messages, tools=tools)
"""


def test_an_agent_with_tools_needs_a_parser_in_training_and_in_evaluation(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "calling.py").write_text(CALLING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    agent = {"name": "agent", "function": "calling:play"}
    told = "environment.tool_parser: the agent gives the policy tools, whose calls have to be parsed; set it to the "
    with pytest.raises(ConfigError, match=told):
        load_problems(config(environment=agent))
    monkeypatch.setattr("gxpo_trainer.training.evaluation.ray_session", lambda *_: pytest.fail("Ray was started"))
    settings = [word for name, value in agent.items() for word in ("--set", f"environment.{name}={value}")]
    file = str(tmp_path / "held_out.jsonl")
    assert (
        Gxpo(capsys).error(2, "eval", "--model", "starter", "--benchmark", file, *settings).startswith(f"gxpo: {told}")
    )


def test_a_model_without_a_chat_template_and_fewer_problems_than_a_step_takes_are_reported(
    config: Any, tmp_path: Path
) -> None:
    shutil.copytree(STARTER_FOLDER, tmp_path / "base", ignore=shutil.ignore_patterns("chat_template*"))
    settings = json.loads((tmp_path / "base/tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (tmp_path / "base/tokenizer_config.json").write_text(json.dumps(settings))
    made = config(model={"path": str(tmp_path / "base")}, rollout={"prompts_per_step": 4})
    prepared = prepare(made, tmp_path / "new")
    (prompt, few, *_), said = recorded(prepared, tmp_path / "run")
    assert said == ["prompts are " + rendering(None), few["message"]]
    assert rendering(None) in prompt["message"]
    assert few["kind"] == "few_problems"
    words = "2 problems for 4 prompts a step: a step contains copies of the same problems; lower"
    assert few["message"].startswith(words)


def test_tokens_that_the_model_has_not_learned_to_embed_are_refused(config: Any, tmp_path: Path) -> None:
    shutil.copytree(STARTER_FOLDER, tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    size = json.loads((tmp_path / "base/config.json").read_text())["vocab_size"]
    tokenizer.add_tokens([f"<{number}>" for number in range(len(tokenizer), size + 1)])
    tokenizer.save_pretrained(tmp_path / "base")
    model = {"path": str(tmp_path / "base")}
    prepare(config(model=model), tmp_path / "run")  # none of them is used
    told = rf"model\.path: the tokenizer's '<{size}>' is token {size}, and the model has {size} .*resize_token_emb"
    with pytest.raises(ConfigError, match=told):
        prepare(config(model=model, data={"template": f"{{problem}} <{size}>"}), tmp_path / "run")
    common, rare = {"problem": "1+1", "answer": "2", "completion": "2"}, {"problem": f"<{size}>", "answer": "2"}
    held_out = str(data_files.write(tmp_path / "rare.jsonl", common, rare))
    taught = str(data_files.write(tmp_path / "taught.jsonl", common, rare | {"completion": "2"}))
    evaluation = {"benchmarks": [held_out], "num_problems": 1}
    prepare(config(model=model, evaluation=evaluation), tmp_path / "run")
    for late in (
        {"evaluation": evaluation | {"full_at_end": True}},
        {"warm_start": {"steps": 1, "rows_per_step": 1, "data": {"source": taught, "template": "plain"}}},
    ):
        with pytest.raises(ConfigError, match=told):
            prepare(config(model=model, **late), tmp_path / "run")
    check_tokens({}, tokenizer, [np.array([9**9])])
    with pytest.raises(ConfigError, match="is token 3, and the model has 3"):
        check_tokens({"vocab_size": 3}, SimpleNamespace(eos_token_id=3, convert_ids_to_tokens=str), [])


@pytest.mark.parametrize(
    ("answer", "template", "system_prompt", "training", "evaluation"),
    [
        ("auto", "boxed", None, True, False),
        ("auto", "plain", None, False, False),
        ("auto", "plain", "Write \\boxed{}.", True, False),
        ("any", "boxed", None, False, False),
        ("boxed", "plain", None, True, True),
    ],
)
def test_only_a_box_counts_where_the_prompt_asks_for_one(
    config: Any, answer: str, template: str, system_prompt: str | None, training: bool, evaluation: bool
) -> None:
    settings = config(verifier={"answer": answer}, data={"template": template, "system_prompt": system_prompt})
    problems = load_problems(settings)
    both = (problems.prompts.prompts, training), (problems.benchmarks[0].benchmark.prompts, evaluation)
    for prompts, boxed in both:
        assert {prompt.extra.get("verify") == VerifyOptions(boxed=True) for prompt in prompts} == {boxed}


@pytest.mark.parametrize(
    ("changes", "evaluated", "setting"),
    [
        ({"data": {"max_prompt_tokens": 23}}, (1, 2), "data.max_prompt_tokens"),
        (
            *({"model": {"max_length": 71}, "rollout": {"max_new_tokens": 48}}, (1, 2)),
            "model.max_length − rollout.max_new_tokens",
        ),
        ({}, (300, 400), "data.contamination"),
    ],
)
def test_a_prompt_that_is_too_long_or_evaluated_is_excluded_and_reported(
    config: Any, tmp_path: Path, changes: dict[str, Any], evaluated: tuple[int, int], setting: str
) -> None:
    """The starter renders the first two in 23 tokens and, digit by digit, the last in 27."""
    train = write(tmp_path / "train.jsonl", [(3, 4), (5, 6), (300, 400)])
    changes = {**changes, "evaluation": {"benchmarks": [write(tmp_path / "short.jsonl", [evaluated])]}}
    changes["data"] = {**changes.get("data", {}), "source": train}
    prepared = prepare(config(**changes), tmp_path / "run", resume=False)
    assert [prompt.id for prompt in prepared.problems.prompts.prompts] == ["3+4", "5+6"]
    (_, event), _ = recorded(prepared, tmp_path / "run")
    assert (event["kind"], event["setting"]) == ("problems_left_out", setting)
    assert event["message"] == f"{setting} excluded 1 training problems"


def test_benchmarks_of_one_name_or_without_room_for_their_prompts_are_refused(config: Any, tmp_path: Path) -> None:
    room = r"^model\.max_length − evaluation\.max_new_tokens = -\d+ excludes .*; raise model\.max_length or lower "
    with pytest.raises(DataError, match=room):
        prepare(config(evaluation={"max_new_tokens": 8000}), tmp_path / "run", resume=False)
    (tmp_path / "other").mkdir()
    names = [str(tmp_path / "held_out.jsonl"), write(tmp_path / "other" / "held_out.jsonl", [(1, 2)])]
    with pytest.raises(ConfigError, match="two have the name held_out"):
        prepare(config(evaluation={"benchmarks": names}), tmp_path / "run", resume=False)


def taught(tmp_path: Path) -> dict[str, Any]:
    """Three rows with completions."""
    sums = [(30, 2), (60, 1), (70, 2)]
    rows = ({"problem": PROBLEM.format(a, b), "answer": str(a + b), "completion": str(a + b)} for a, b in sums)
    return {"source": str(data_files.write(tmp_path / "taught.jsonl", *rows)), "template": "plain"}


def test_data_of_a_warm_start_is_told_apart_from_training_data_of_the_same_name(config: Any, tmp_path: Path) -> None:
    """The benchmark has two of the three problems and one of the three rows."""
    (tmp_path / "own").mkdir()
    data = {"source": write(tmp_path / "own" / "taught.jsonl", [(3, 4), (5, 6), (20, 1)])}
    warm_start = {"steps": 1, "rows_per_step": 3, "data": taught(tmp_path)}
    made = config(data=data, warm_start=warm_start, rollout={"prompts_per_step": 1})
    prepared = prepare(made, tmp_path / "run")
    events, (few,) = recorded(prepared, tmp_path / "events")
    assert few.startswith("2 problems for 3 prompts a step: ")
    assert few.endswith("; lower warm_start.rows_per_step or add problems")
    left_out = [f"{section}.contamination excluded" for section in ("warm_start.data", "data")]
    told = [few, f"{left_out[0]} 1 training problems", f"{left_out[1]} 2 training problems"]
    assert [event["message"] for event in events[1:]] == told
    save_checkpoint(prepared)
    prepare(made, tmp_path / "run", resume=True)
    file = tmp_path / "taught.jsonl"
    file.write_text(file.read_text().replace("72", "73"))
    with pytest.raises(CheckpointError, match=r"content of training/warm_start/taught\.jsonl has changed since"):
        prepare(made, tmp_path / "run", resume=True)


def test_faults_of_the_rows_of_a_warm_start_name_its_settings(config: Any, tmp_path: Path) -> None:
    def refused(rows_per_step: int, **data: Any) -> str:
        with pytest.raises(DataError) as refusal:
            load_problems(config(warm_start={"steps": 1, "rows_per_step": rows_per_step, "data": data}))
        return str(refusal.value)

    whole = taught(tmp_path)
    excluded = refused(1, **whole, max_prompt_tokens=3)
    assert excluded.startswith("warm_start: data.max_prompt_tokens = 3 excludes all prompts")
    # One of three rows is evaluated.
    few = refused(3, sources=[{"path": whole["source"]}], template="plain")
    assert few.startswith("warm_start: data.sources[0].path = ")
    assert "2 problems for its share of 3 of 3 prompts a step" in few
    assert few.endswith("; lower its weight or warm_start.rows_per_step, or add problems")


@pytest.mark.parametrize("kind", ["one source", "two sources", "dataset", "warm start"])
def test_a_resumed_run_draws_from_its_own_training_problems(config: Any, tmp_path: Path, kind: str) -> None:
    """A benchmark more is welcome, unless it excludes problems that the run has drawn from."""
    train, other = str(tmp_path / "train.jsonl"), write(tmp_path / "other.jsonl", [(20, 1), (30, 2), (90, 3)])
    changes: dict[str, Any] = {
        "one source": {},
        "two sources": {"data": {"source": "word_problems", "sources": [{"path": train}, {"path": other}]}},
        "dataset": {"data": taught(tmp_path), "rollout": {"source": "dataset"}},
        "warm start": {"warm_start": {"steps": 1, "rows_per_step": 1, "data": taught(tmp_path)}},
    }[kind]
    begun = write(tmp_path / "begun.jsonl", [(5, 6), (30, 2)])
    harmless, overlapping = write(tmp_path / "new.jsonl", [(80, 1)]), write(tmp_path / "own.jsonl", [(60, 1), (20, 1)])
    if kind == "one source":
        overlapping = write(tmp_path / "own.jsonl", [(3, 4)])

    def evaluated(*benchmarks: str) -> RunConfig:
        return config(**changes, evaluation={"benchmarks": benchmarks})  # type: ignore[no-any-return]

    out = tmp_path / "run"
    save_checkpoint(prepare(evaluated(begun), out))
    prepare(evaluated(begun, harmless), out, resume=True)
    told = r"step-00000001 was written with other training problems than those that data\.contamination = 'drop' leaves"
    told += (
        r" with evaluation\.benchmarks = \['.*own\.jsonl'\]; resume with \['.*begun\.jsonl'\], unchanged, and score "
    )
    for resumed in ({"resume": True}, {"continue_run": True}):
        with pytest.raises(CheckpointError, match=told + "others by `gxpo eval`"):
            prepare(evaluated(begun, overlapping), out, **resumed)
    with pytest.raises(CheckpointError, match="other training problems"):
        prepare(evaluated(harmless), out, resume=True)


@pytest.mark.parametrize("how", ["resume", "continue_run"])
def test_a_run_without_a_checkpoint_starts_from_its_first_step_with_the_settings_and_data_that_it_began_with(
    config: Any, tmp_path: Path, how: str
) -> None:
    out, resumed = tmp_path / "run", {how: True}
    save_checkpoint(prepare(config(), out))
    shutil.rmtree(out / "checkpoints")
    prepared = prepare(config(), out, **resumed)
    assert prepared.checkpoint is None
    events, said = recorded(prepared, out)
    assert said[0] == events[0]["message"] == "no checkpoint yet: the run starts again from step 1"
    faster = config(learner={"optimizer": {"learning_rate": 1e-3}})
    told = r"run\.json was written with learner\.optimizer\.learning_rate = 1e-0\d, this run has 0\.001; resume with"
    with pytest.raises(CheckpointError, match=told):
        prepare(faster, out, **resumed)
    write(tmp_path / "train.jsonl", [(3, 5), (5, 6), (7, 8)])
    with pytest.raises(CheckpointError, match="began with other data"):
        prepare(config(), out, **resumed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"placement": {"samplers": 999, "sampler_cpus": 0.75}},
            r"requires 750\.5 CPUs but Ray has \d+ CPUs; lower learner_ranks, samplers or",
        ),
        ({"learner": {"packing": "packed", "token_budget": 16384}}, r"dense mask of 16384 × 16384"),
        ({"verifier": {"rewards": [{"name": "a.b:C"}]}}, "is not allowed on this machine"),
    ],
    ids=["too many devices", "mask", "reward"],
)
def test_what_cannot_run_is_refused_before_anything_starts(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("GXPO_REWARD_ALLOWLIST", "")
    # As in a process of its own: another test of this process may have started Ray.
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray was started"))
    placement = {"device": "cpu", **changes.get("placement", {})}
    with pytest.raises((ConfigError, DataError), match=message):
        train_run(config(**changes | {"placement": placement}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_template_that_rewrites_earlier_turns_is_refused_for_conversations(config: Any, tmp_path: Path) -> None:
    rewriting = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% if loop.last %}{{ m['content'] }}{% endif %}"
        "{{ eos_token }}{% endfor %}"
    )
    folder = shutil.copytree(STARTER_FOLDER, tmp_path / "policy")
    (folder / "chat_template.jinja").write_text(rewriting)
    model = {"path": str(folder)}
    conversing = config(model=model, environment={"name": "calculator"})
    with pytest.raises(ConfigError, match=r"chat template of model.path = '.*policy'.*earlier turn.*begins .\{% for m"):
        prepare(conversing, tmp_path / "run", resume=False)
    # A single turn is rendered once.
    prepare(config(model=model), tmp_path / "run", resume=False)


def test_conversations_leave_room_for_their_observations(config: Any, tmp_path: Path) -> None:
    def prepared(max_length: int, observed: int = 30) -> Any:
        environment = {"name": "calculator", "max_turns": 3, "max_observation_tokens": observed}
        settings = config(environment=environment, model={"max_length": max_length}, rollout={"max_new_tokens": 40})
        return prepare(settings, tmp_path / "run", resume=False)

    longest = max(len(ids) for ids in prepared(1000).problems.benchmarks[0].token_ids)
    # Two observations of 30 tokens, and 40 sampled ones.
    assert len(prepared(longest + 100).problems.prompts.prompts) == 2
    with pytest.raises(ConfigError, match="leave no room for 40 new tokens"):
        prepared(longest + 99)
    with pytest.raises(ConfigError, match="max_observation_tokens = 3 leaves no room for an observation"):
        prepared(1000, observed=3)
