"""The `gxpo` command: exit codes, one message an error, commands from entry points."""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path

import pytest

from gxpo_trainer import cli
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import preset_names
from gxpo_trainer.config.tasks import EnvironmentConfig
from gxpo_trainer.errors import ConfigError, Diverged
from gxpo_trainer.training import evaluation


def run(*argv: str | Path) -> int:
    return cli.main([str(part) for part in argv])


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("--help")
    assert ended.value.code == 0
    out = capsys.readouterr().out
    commands = ("train", "eval", "grade", "config", "report", "study", "plan", "checkpoints", "submit", "up")
    assert all(f"    {name}" in out for name in commands)


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("nonsense",),
        ("config",),
        ("train",),
        ("train", "x.toml", "--log", "mlflow"),
        ("eval", "--model", "m", "--benchmark", ""),
        ("eval", "--model", "m", "--benchmark", "b", "--samples", "0"),
        ("grade", "f.jsonl", "--deadline", "nan"),
        ("report",),
        ("report", "runs/a", "--smoothing", "1"),
    ],
)
def test_bad_usage_ends_with_code_2(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(*argv)
    assert ended.value.code == 2
    assert "usage: gxpo" in capsys.readouterr().err


@pytest.mark.parametrize("output", ["toml", "json"])
def test_a_printed_preset_passes_the_check(output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "--preset", "demo", "--format", output, "--set", "learner.rule.k=7") == 0
    file = tmp_path / f"run.{output}"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    assert run("config", "--check", file) == 0
    assert capsys.readouterr().out == f"{file}: valid, rule gxpo, budget steps 40\n"


def test_a_printed_preset_states_passes_and_the_expected_false_alarm(capsys: pytest.CaptureFixture[str]) -> None:
    run("config", "--preset", "paper-1.5b")
    head = capsys.readouterr().out.splitlines()[:2]
    assert head[0].startswith("# GXPO: 3 backward passes per step")
    assert head[1].startswith("# On noise alone the gate is expected to fire at step 93")
    run("config", "--preset", "paper-1.5b-sfpo", "--set", "learner.rule.gate.threshold=inf")
    head = capsys.readouterr().out.splitlines()[:2]
    assert head[0].startswith("# SFPO: 6 backward passes per step")
    assert head[1] == "# The gate never fires: the look-ahead stays on to the end."
    run("config", "--preset", "demo-grpo")
    assert capsys.readouterr().out.startswith("# GRPO: 1 backward pass per step.\n\n")


@pytest.mark.parametrize(
    ("placement", "stated"),
    [
        (
            'device = "gpu"\nlearner_ranks = 3\ntensor_parallel = 2',
            ["# Needs 5 GPUs: 3 for the learner and 2 for the samplers."],
        ),
        (
            'device = "gpu"\nlearner_ranks = 2\ntensor_parallel = 2',
            ["# Needs 2 GPUs, which learner and samplers share, or 4: 2 for the learner and 2 for the samplers."],
        ),
        (
            'device = "gpu"\nlearner_ranks = 2\ntensor_parallel = 2\ncolocate = true',
            ["# Needs 2 GPUs, which learner and samplers share."],
        ),
        ('device = "cpu"', []),
    ],
)
def test_a_printed_config_states_the_gpus_that_it_needs(
    placement: str, stated: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[placement]\n{placement}\n")
    assert run("config", "--file", file) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if "GPUs" in line] == stated


def test_a_bad_run_file_ends_with_code_2_and_one_line_a_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('seed = -1\n[learner.rule]\nname = "gxpo"\nk = 1\n')
    assert run("config", "--check", file) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        f"gxpo: {file} cannot be used:",
        "  seed = -1: must be at least 0",
        "  learner.rule.k = 1: must be at least 2: the rule needs two steps to look ahead; set it to 2 or more",
    ]


def test_a_run_file_is_printed_with_its_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text("seed = 5\n")
    assert run("config", "--file", file) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert printed["seed"] == 5
    assert printed["learner"]["rule"]["k"] == RunConfig().learner.rule.k  # type: ignore[union-attr]


def test_the_schema_describes_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "--schema") == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["$defs"]["GxpoRule"]["properties"]["k"]["description"].startswith("K:")


def test_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "--list-presets") == 0
    assert capsys.readouterr().out.split() == preset_names()


def test_train_hands_over_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(cli, "run_train", lambda args: seen.append(args))
    assert run("train", "r.toml", "--set", "a=1", "--set", "b=2", "--out", "o", "--resume", "--log", "wandb") == 0
    (args,) = seen
    assert (args.config, args.set, args.out) == (Path("r.toml"), ["a=1", "b=2"], Path("o"))
    assert (args.resume, args.log) == (True, ("wandb",))


def test_eval_hands_over_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(cli, "run_eval", lambda args: seen.append(args) or 1)
    assert run("eval", "--model", "m", "--benchmark", "math500, gsm8k", "--samples", "4") == 1
    assert (seen[0].model, seen[0].benchmark, seen[0].samples) == ("m", ("math500", "gsm8k"), 4)


@pytest.mark.parametrize("temperature", ["0", "0.009", "2.1", "nan"])
def test_eval_refuses_temperatures_that_vllm_would_change(temperature: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eval", "--model", "starter", "--benchmark", "b", "--temperature", temperature) == 2
    assert f"--temperature {float(temperature)}: must be from 0.01 to 2" in capsys.readouterr().err


def test_eval_refuses_an_engine_that_cannot_split_the_heads_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []
    monkeypatch.setattr(evaluation, "_sample_and_grade", lambda *args: started.append("engine") or [])
    monkeypatch.setattr(evaluation, "load_tokenizer", lambda model: started.append("tokenizer"))
    three = ("--set", "placement.device=cpu", "--set", "placement.tensor_parallel=3")
    assert run("eval", "--model", "starter", "--benchmark", "word-problems", *three) == 2
    assert "placement.tensor_parallel = 3 does not divide the 4 attention heads" in capsys.readouterr().err
    assert started == []


def test_eval_plays_in_the_environment_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(cli, "run_eval", lambda args: seen.append(args) or 0)
    mine = ("eval", "--model", "starter", "--benchmark", "b", "--max-new-tokens", "40")
    run(*mine)
    changes = ("name=calculator", "max_turns=3", "max_observation_tokens=20")
    run(*mine, *(word for change in changes for word in ("--set", f"environment.{change}")))
    run(*mine, "--set", "environment.name=openenv")
    single, played = (evaluation._config(args, "starter") for args in seen[:2])
    assert single.environment == EnvironmentConfig()
    assert played.environment == EnvironmentConfig(name="calculator", max_turns=3, max_observation_tokens=20)
    # Two observations have room in addition to the tokens of the policy.
    assert played.model.max_length == single.model.max_length + 40
    with pytest.raises(ConfigError, match=r"environment.name = .openenv. needs an address"):
        evaluation._config(seen[2], "starter")


def graded(path: Path) -> list[str]:
    return [json.loads(line)["verdict"] for line in path.read_text().splitlines()]


def test_grade_writes_one_verdict_a_line_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    answers = ["so \\boxed{0.5}", "so \\boxed{2}", ""]
    file.write_text("".join(json.dumps({"gold": "1/2", "prediction": answer}) + "\n" for answer in answers))
    assert run("grade", file, "--workers", "1", "--deadline", "60", "--out", out) == 0
    assert graded(out) == ["correct", "wrong", "unparsed"]
    assert capsys.readouterr().err.strip() == "1 correct, 1 wrong, 1 unparsed, 0 timeout, 0 error"
    assert sorted(tmp_path.iterdir()) == [file, out]


def test_grade_of_bad_input_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text('{"gold": "1", "prediction": "1"}\n{"gold": "1"}\n')
    out.write_text("precious")
    assert run("grade", file, "--out", out) == 2
    assert "in.jsonl, line 2" in capsys.readouterr().err
    assert out.read_text() == "precious"
    assert run("grade", file, "--out", file) == 2
    assert "is the input file" in capsys.readouterr().err
    assert run("grade", file, "--out", tmp_path / "nowhere" / "out.jsonl") == 2
    assert "cannot be written" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [file, out]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [(Diverged("loss is NaN"), 1, "gxpo: loss is NaN\n"), (KeyboardInterrupt(), 130, "gxpo: interrupted\n")],
)
def test_an_error_becomes_one_message_and_its_exit_code(
    error: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(cli, "run_report", fail)
    assert run("report", "runs/a") == code
    assert capsys.readouterr().err == message


def test_an_unforeseen_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "run_report", fail)
    with pytest.raises(ZeroDivisionError):
        run("report", "runs/a")
