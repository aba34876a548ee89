"""The `gxpo` command: exit codes, one message an error, commands from entry points; `gxpo plan`."""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gxpo_trainer import cli
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import load_preset, preset_names, to_toml
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
        ("plan", "x.toml", "--gpus", "0"),
        ("train", "x.toml", "--resume", "--continue"),
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
    mine = ("eval", "--model", "starter", "--benchmark", "math500, gsm8k", "--max-new-tokens", "40")
    run(*mine)
    changes = ("name=calculator", "max_turns=3", "max_observation_tokens=20")
    run(*mine, *(word for change in changes for word in ("--set", f"environment.{change}")))
    run(*mine, "--set", "environment.name=openenv")
    assert seen[0].benchmark == ("math500", "gsm8k")
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


@pytest.fixture
def paper(tmp_path: Path) -> Path:
    file = tmp_path / "paper.toml"
    apart = ["placement.learner_ranks=3", "placement.samplers=1", "placement.colocate=false"]
    file.write_text(to_toml(load_preset("paper-1.5b", apart)), encoding="utf-8")
    return file


def planned(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, dict[str, Any]]:
    code = run("plan", *argv, "--format", "json")
    return code, json.loads(capsys.readouterr().out)


def test_memory_time_cost_and_assumptions_are_printed(paper: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", paper, "--gpus", "4", "--gpu", "h100-80") == 0
    out = capsys.readouterr().out
    assert out.startswith("paper-1.5b on 4 × h100-80: fits\n")
    for words in ("Memory per device, learner", "Memory per device, sampler", "KV cache", "rule buffers", "GPU hours"):
        assert words in out
    assert "1,543,714,304 parameters" in out
    assert "GXPO K=5 *" in out


def test_a_run_that_does_not_fit_ends_with_code_1_and_the_setting(
    paper: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", paper, "--gpu", "a100-40", "--set", "model.gradient_checkpointing=false") == 1
    out = capsys.readouterr().out
    assert "paper-1.5b on 4 × a100-40: does not fit" in out
    assert "set model.gradient_checkpointing = true." in out


def test_four_gpus_are_shared_by_as_many_ranks_and_samplers(paper: Path, capsys: pytest.CaptureFixture[str]) -> None:
    even = ("placement.learner_ranks=4", "placement.samplers=4", "placement.colocate=auto")
    code, plan = planned(capsys, paper, "--gpus", "4", *(part for change in even for part in ("--set", change)))
    assert (code, plan["devices_needed"], plan["shared_devices"], plan["resident"]) == (0, 4, True, True)
    assert run("plan", paper, "--gpus", "4", *(part for change in even for part in ("--set", change))) == 0
    assert "Learner and sampler stay on their shared devices." in capsys.readouterr().out


def test_as_many_gpus_as_asked_for_are_planned(paper: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, plan = planned(capsys, paper, "--gpu", "h100-80", "--set", "placement.learner_ranks=7")
    assert (code, plan["num_devices"], plan["devices_needed"]) == (0, 8, 8)
    own = next(rule for rule in plan["rules"] if rule["own"])
    assert own["gpu_hours"] == pytest.approx(8 * own["hours"])
    assert own["seconds"]["step"] == pytest.approx(sum(own["seconds"].values()) - own["seconds"]["step"])


def test_a_host_is_planned_with_its_own_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "demo.toml"
    file.write_text(to_toml(load_preset("demo", ["placement.device=cpu"])), encoding="utf-8")
    code, plan = planned(capsys, file)
    assert (code, plan["device"]) == (0, "cpu")
    assert plan["memory"][0]["limit_bytes"] > 2**30
    assert [rule["gpu_hours"] for rule in plan["rules"]] == [None, None, None]


def test_an_unknown_gpu_names_the_known_ones(paper: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", paper, "--gpu", "h1000") == 2
    message = capsys.readouterr().err
    assert "there is no device 'h1000'" in message
    assert "h100-80, h100-94, h200-141, b200-180, a100-40" in message


def test_a_model_folder_without_a_config_is_named(
    paper: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", paper, "--set", f"model.path={tmp_path}") == 2
    assert f"model.path = '{tmp_path}' has no config.json" in capsys.readouterr().err


def test_an_engine_that_cannot_split_the_heads_is_refused(paper: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Qwen2.5-1.5B: 12 heads, 2 key/value heads.
    assert run("plan", paper, "--set", "placement.tensor_parallel=3") == 2
    assert (
        "placement.tensor_parallel = 3 does not divide the 12 attention heads and 2 key/value heads of "
        "'Qwen/Qwen2.5-1.5B-Instruct'; set it to one of 1, 2, 4, 6, 12" in capsys.readouterr().err
    )


def finished_run(folder: Path, config: RunConfig, update_s: float, steps: int = 4) -> Path:
    """A run's folder with equal steps."""
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    metrics = {
        "rollout/length_mean": 30.0,
        "rollout/prompt_length_mean": 40.0,
        "update/backward_passes": 3.0,
        "time/rollout_s": 2.0,
        "time/verify_s": 0.25,
        "time/update_s": update_s,
        "time/sync_s": 0.5,
        "time/step_s": update_s + 3.0,
    }
    rows = [{"attempt": 1, "step": step, "time": 0.0, "metrics": metrics} for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def test_a_calibrated_plan_repeats_the_runs_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_preset("demo", ["placement.device=cpu"])
    file = tmp_path / "demo.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    measured = finished_run(tmp_path / "measured", config, update_s=7.0)
    _, plan = planned(capsys, file, "--calibrate", measured)
    own = next(rule for rule in plan["rules"] if rule["own"])
    assert own["seconds"]["sampling"] == pytest.approx(2.0)
    assert own["seconds"]["passes"] + own["seconds"]["look_ahead"] == pytest.approx(7.0)
    assert own["seconds"]["step"] == pytest.approx(10.0)
    assert any("calibrated to measured" in line for line in plan["assumptions"])


def test_a_folder_that_is_no_run_cannot_calibrate(
    paper: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", paper, "--calibrate", tmp_path / "nothing") == 2
    assert "nothing has no config.toml; name the output folder of a run" in capsys.readouterr().err
