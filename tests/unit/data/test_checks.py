"""What a run's files tell: each fault, from each entrance, before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.data_files import write

from gxpo_services.api.errors import Invalid
from gxpo_services.runs import configs
from gxpo_services.settings import ServiceSettings
from gxpo_trainer import cli
from gxpo_trainer.config.io import build
from gxpo_trainer.data.checks import check_files
from gxpo_trainer.errors import GxpoError
from gxpo_trainer.learner.models import STARTER_FOLDER
from gxpo_trainer.training.prepare import prepare

Settings = dict[str, dict[str, Any]]


def with_config(folder: Path, **changes: Any) -> None:
    """The starter policy's files with another config.json."""
    folder.mkdir()
    for file in STARTER_FOLDER.iterdir():
        (folder / file.name).symlink_to(file)
    body = json.loads((STARTER_FOLDER / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(body | changes))


def entrances() -> dict[str, Callable[[Settings, Path], str]]:
    """What each entrance answers to a config: the message of its refusal."""

    def command(*words: str) -> Callable[[Settings, Path], str]:
        def answer(settings: Settings, folder: Path) -> str:
            file = folder / "run.json"
            file.write_text(json.dumps(settings))
            args = cli.build_parser().parse_args([*words, str(file)])
            with pytest.raises(GxpoError) as refused:
                args.run(args)
            assert refused.value.exit_code == 2
            return str(refused.value)

        return answer

    def train(settings: Settings, folder: Path) -> str:
        with pytest.raises(GxpoError) as refused:
            prepare(build(settings), folder / "run")
        assert refused.value.reason in ("invalid_config", "no_resources")
        return str(refused.value)

    def service(settings: Settings, folder: Path) -> str:
        with pytest.raises(Invalid) as refused:
            configs.checked(settings, ServiceSettings())
        return "; ".join(f"{error.field.removeprefix('config.')}: {error.message}" for error in refused.value.errors)

    # `submit --check`, Submit and sweeps ask the service, which answers by `configs.checked`.
    return {"config --check": command("config", "--check"), "plan": command("plan"), "train": train, "service": service}


def sources(second: dict[str, Any]) -> Settings:
    return {"data": {"source": "word_problems", "sources": [{"path": "mine.jsonl"}, second]}}


FAULTS: dict[str, Settings] = {
    "the architecture t5 is an encoder-decoder; use a decoder-only": {"model": {"path": "t5"}},
    "scales its logits (final_logit_softcapping = 30.0)": {"model": {"path": "capped"}},
    "has experts (num_experts = 4)": {"model": {"path": "experts"}},
    "scales its logits (logits_scaling = 6.0)": {"model": {"path": "both"}, "learner": {"lora": {}}},
    "is quantized": {"model": {"path": "quantized"}},
    "model.path = './nope': the folder does not exist": {"model": {"path": "./nope"}},
    "model.path = 'my-modle': the folder does not exist": {"model": {"path": "my-modle"}},
    "model.path = '~nobody/policy': the folder does not exist": {"model": {"path": "~nobody/policy"}},
    "placement.tensor_parallel = 3 does not divide the 4 attention heads": {"placement": {"tensor_parallel": 3}},
    "learner.sequence_parallel = 3 does not divide the 4 attention heads and": {
        "learner": {"sequence_parallel": 3},
        "placement": {"learner_ranks": 3},
    },
    "max_length = 4097 exceeds the 4096 positions of 'starter'; set": {"model": {"max_length": 4097}},
    "data.source: cannot be read (": {"data": {"source": f"/{'x' * 300}.jsonl"}},
    "has no field 'question' (its fields: answer, problem)": {"data": {"prompt_field": "question"}},
    "data.sources[1].path = 'other.jsonl': 2 problems for its share of 3 of 4 prompts a step": sources(
        {"path": "other.jsonl", "weight": 3}
    )
    | {"rollout": {"prompts_per_step": 4}},
    "data.sources[1].weight = 0.001 is less than one of the 80 prompts of the run": sources(
        {"path": "other.jsonl", "weight": 0.001}
    ),
    "data.sources[1].rewards: 'judge' is no component of verifier.rewards; choose from correctness": sources(
        {"path": "other.jsonl", "rewards": ["judge"]}
    ),
    'data.sources[1].answer_field = "none"': sources({"path": "other.jsonl", "answer_field": None}),
    "two sources are called mine": sources({"path": "mine.jsonl"}),
    "source = 'mine.jsonl' and sources are both set; remove one": {
        "data": {"source": "mine.jsonl", "sources": [{"path": "other.jsonl"}]}
    },
    "has no field 'completion' (its fields: answer, problem); set data.completion_field": {
        "rollout": {"source": "dataset"}
    },
    "warm_start: mine.jsonl:1: has no field 'completion' (its fields: answer, problem); set data.completion_field": {
        "warm_start": {"steps": 1}
    },
    "warm_start: data.source = 'nope.jsonl' does not exist": {
        "warm_start": {"steps": 1, "data": {"source": "nope.jsonl"}}
    },
    "warm_start: data.sources[0].path = 'rows.jsonl': 1 problem for its share of 2 of 3 prompts a step, which would "
    "contain copies; lower its weight or warm_start.rows_per_step, or add problems": {
        "warm_start": {
            "steps": 1,
            "rows_per_step": 3,
            "data": {"sources": [{"path": "rows.jsonl", "weight": 2}, {"path": "rows.jsonl", "name": "again"}]},
        }
    },
    "evaluation.benchmarks: 'math5000' is unknown; use": {"evaluation": {"benchmarks": ["math5000"]}},
    "rollout.max_new_tokens = 3: none of the 2 answers fits, the shortest has 4 tokens; raise it": {
        "rollout": {"max_new_tokens": 3}
    },
}
"""Words of each refusal, and the settings that are refused."""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A run that works: two problems, whose answers the starter policy writes digit by digit."""
    monkeypatch.chdir(tmp_path)
    rows = [{"problem": "1 + 1233", "answer": "1234"}, {"problem": "1 + 12344", "answer": "12345"}]
    for name in ("mine.jsonl", "other.jsonl"):
        write(tmp_path / name, *rows)
    write(tmp_path / "rows.jsonl", {"problem": "1 + 1233", "completion": "1234"})
    with_config(tmp_path / "t5", model_type="t5")
    with_config(tmp_path / "capped", final_logit_softcapping=30.0)
    with_config(tmp_path / "experts", num_experts=4)
    with_config(tmp_path / "both", num_experts=4, logits_scaling=6.0)
    with_config(tmp_path / "quantized", quantization_config={"bits": 4})
    return {
        "model": {"max_length": 128},
        "data": {"source": "mine.jsonl", "template": "plain"},
        "rollout": {"prompts_per_step": 2},
        "budget": {"steps": 40},
        "evaluation": {"benchmarks": ["word_problems"]},
        "placement": {"device": "cpu"},
    }


def merged(base: Settings, changes: Settings) -> Settings:
    return base | {section: base.get(section, {}) | values for section, values in changes.items()}


@pytest.mark.parametrize(
    ("words", "entrance"),
    [
        *((words, "config --check") for words in FAULTS),
        *((words, entrance) for words in FAULTS for entrance in entrances() if "heads" in words or "fits" in words),
    ],
)
def test_file_faults_are_refused_at_each_entrance(base: Settings, tmp_path: Path, words: str, entrance: str) -> None:
    assert words in entrances()[entrance](merged(base, FAULTS[words]), tmp_path)


def test_a_run_that_works_has_no_fault_and_all_faults_are_said_at_once(base: Settings) -> None:
    found = check_files(build(base))
    assert found.faults == found.notes == ()
    changes = {"placement": {"device": "gpu", "tensor_parallel": 3}, "data": {"source": "nope.jsonl"}}
    found = check_files(build(merged(base, changes)), gpus=0)
    assert [setting for setting, _ in found.faults] == ["placement.tensor_parallel", "data.source", "placement.device"]
    lines = r"(?s)the run cannot work:\n  placement.tensor_parallel.*\n  data.source.*\n  placement.device"
    with pytest.raises(GxpoError, match=lines):
        found.refuse()


def test_completions_need_no_answer_that_fits_and_what_is_downloaded_is_said(base: Settings) -> None:
    changes = {"data": {"source": "rows.jsonl"}, "rollout": {"source": "dataset", "max_new_tokens": 3}}
    found = check_files(build(merged(base, changes)))
    assert (found.faults, len(found.notes)) == ((), 1)
    assert found.notes[0].startswith("1 problem for 2 prompts a step")
    found = check_files(build(merged(base, {"evaluation": {"benchmarks": []}})))
    assert [note.partition(":")[0] for note in found.notes] == ["evaluation.benchmarks names none"]
    warm_start = {"steps": 1, "rows_per_step": 3, "data": {"source": "rows.jsonl"}}
    (few,) = check_files(build(merged(base, {"warm_start": warm_start}))).notes
    assert few.startswith("1 problem for 3 prompts a step: ")
    assert few.endswith("; lower warm_start.rows_per_step or add problems")
    downloaded = "warm_start.data.source = 'org/rows' is no file or folder here: a run downloads it from the hub"
    found = check_files(build(merged(base, {"warm_start": {"steps": 1, "data": {"source": "org/rows"}}})))
    assert (found.faults, found.notes) == ((), (downloaded,))


def test_nothing_follows_from_folders_that_only_other_machines_have(base: Settings, tmp_path: Path) -> None:
    settings = merged(base, {"model": {"path": "/models/mine"}, "data": {"source": "/data/mine.jsonl"}})
    elsewhere = ServiceSettings(model_roots=(Path("/models"),), data_roots=(Path("/data"),))
    assert configs.checked(settings, elsewhere).model.path == "/models/mine"
    here = ServiceSettings(data_roots=(tmp_path,))
    with pytest.raises(Invalid, match=r"config.data.source: .* does not exist"):
        configs.checked(merged(base, {"data": {"source": f"{tmp_path}/x.jsonl"}}), here)
