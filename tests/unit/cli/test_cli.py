"""The `gxpo` command: exit codes, one message an error, commands from entry points; `gxpo plan`."""

from __future__ import annotations

import argparse
import json
import socket
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.command_line import Gxpo

from gxpo_trainer import cli
from gxpo_trainer.config.io import load_preset, to_toml
from gxpo_trainer.config.tasks import EnvironmentConfig
from gxpo_trainer.errors import ConfigError, Diverged
from gxpo_trainer.training import evaluation

RECORDED = Path(__file__).parents[2] / "browser" / "recordings" / "demo-grpo"


@pytest.fixture
def gxpo(capsys: pytest.CaptureFixture[str]) -> Gxpo:
    return Gxpo(capsys)


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("config",),
        ("train", "x.toml", "--log", ","),
        ("eval", "--model", "m", "--benchmark", "b", "--samples", "0"),
        ("grade", "f.jsonl", "--deadline", "nan"),
        ("report", "runs/a", "--sampling-share", "1"),
        ("plan", "x.toml", "--gpus", "0"),
        ("train", "x.toml", "--resume", "--continue"),
        ("checkpoints", "export", "runs/a"),
        ("train", "--preset", "demo"),
        ("study run", "x.toml", "--preset", "demo"),
        ("sweep", "--preset", "demo", "--seeds", "0-9999999999"),
        ("demo", "--passes", "0"),
        *(("up", "--dashboard-port", port) for port in ("0", "-5", "65536")),
    ],
)
def test_bad_usage_ends_with_code_2_and_the_usage_of_the_command(argv: tuple[str, ...], gxpo: Gxpo) -> None:
    with pytest.raises(SystemExit) as ended:
        gxpo(*(word for part in argv for word in part.split()))
    assert ended.value.code == 2
    assert gxpo.printed().err.startswith(" ".join(("usage: gxpo", *argv[:1])))


def test_a_sandbox_that_cannot_listen_names_its_address(gxpo: Gxpo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gxpo_trainer.grading.sandbox.Sandbox", Mock())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in (taken.getsockname()[1], 99999):
            told = gxpo.error(2, "sandbox", "--port", port)
            assert told.startswith(f"gxpo: --host 127.0.0.1 --port {port}: ")
            assert told.endswith("; choose another address or port\n")


def test_a_printed_preset_passes_the_check_and_a_bad_file_ends_with_code_2_and_each_setting(
    tmp_path: Path, gxpo: Gxpo
) -> None:
    assert gxpo("config", "--preset", "demo", "--set", "learner.rule.k=7") == 0
    file = tmp_path / "run.toml"
    file.write_text(gxpo.printed().out, encoding="utf-8")
    assert gxpo.out("config", "--check", file) == f"{file}: valid, rule gxpo, budget steps 40\n"
    file.write_text('seed = -1\n[learner.rule]\nname = "gxpo"\nk = 1\n')
    assert gxpo("config", "--check", file) == 2
    out, err = gxpo.printed()
    bad = "  seed = -1: must be at least 0\n  learner.rule.k = 1: must be at least 2\n"
    assert (out, err) == ("", f"gxpo: {file} cannot be used:\n{bad}")
    fine = tmp_path / "fine.toml"
    fine.touch()
    assert gxpo("config", "--check", file, "--check", fine) == 2
    assert gxpo.printed().out == ""
    assert len(gxpo.out("config", "--check", fine, "--check", fine).splitlines()) == 2
    folder = f"gxpo: {tmp_path} is a folder; name a .toml or .json file in it\n"
    assert gxpo.error(2, "config", "--check", tmp_path) == folder


def test_a_printed_preset_states_passes_and_the_expected_false_alarm(gxpo: Gxpo) -> None:
    head = gxpo.out("config", "--preset", "paper-1.5b").splitlines()[:2]
    assert head[0].startswith("# GXPO: 3 backward passes per step")
    assert head[1].startswith("# On noise alone the gate is expected to fire at step 93")
    assert gxpo.out("config", "--preset", "demo-grpo").startswith("# GRPO: 1 backward pass per step.\n\n")
    assert "there is no preset ''; choose one of demo" in gxpo.error(2, "config", "--preset", "")


def test_prompts_of_a_run_file_are_shown_as_the_policy_sees(tmp_path: Path, gxpo: Gxpo) -> None:
    (tmp_path / "own.csv").write_text("question,final\n2+2?,4\n")
    file = tmp_path / "run.toml"
    file.write_text(f'[data]\nsource = "{tmp_path}/own.csv"\nprompt_field = "question"\nanswer_field = "final"\n')
    settings = ("--set", "data.template=Q: {problem}", "--set", 'evaluation.benchmarks=["word_problems"]')
    first, second = gxpo.out("config", "--show-prompt", file, *settings).split("\n\n")[:2]
    assert first.splitlines()[0].startswith("first of 1 training prompts, ")
    assert first.endswith("rendered with the model's chat template:\n<|bos|><|user|>Q: 2+2?<|end|><|assistant|>")
    assert second.startswith("first of 256 word_problems prompts, ")
    (tmp_path / "own.csv").write_text("question,completion\n2+2?,It is 4\n")
    learned = (*settings[:2], "--set", "rollout.source=dataset")
    prompt, completion = gxpo.out("config", "--show-prompt", file, *learned).split("\n\n")
    assert prompt.startswith("first of 1 training prompts, ")
    assert completion.startswith("first of 1 completions, ")
    assert completion.endswith(" tokens, with the end token:\nIt is 4<|end|>\n"), "and no reward"


def test_a_check_says_what_a_run_would_download_and_what_is_missing(
    tmp_path: Path, gxpo: Gxpo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a check must ask no hub"))
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\npath = "m/nope"\n[data]\nsource = "org/problems"\n[evaluation]\nbenchmarks = ["math500"]\n'
    )
    assert gxpo.out("config", "--check", file).splitlines()[1:] == [
        "  model.path = 'm/nope' is no folder here: a run downloads it from the hub",
        "  data.source = 'org/problems' is no file or folder here: a run downloads it from the hub",
        "  evaluation.benchmarks: a run downloads math500 from the hub, unless its cache has it",
    ]
    (tmp_path / "m" / "nope").mkdir(parents=True)
    assert "model.path = 'm/nope'" in gxpo.error(2, "config", "--check", file)


@pytest.mark.parametrize(
    "command",
    [
        ("report", "RUN"),
        ("eval", "--model", "starter", "--benchmark", "word_problems"),
        ("train", "FILE"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    command: tuple[str, ...], tmp_path: Path, gxpo: Gxpo
) -> None:
    argv = [{"RUN": str(RECORDED), "FILE": str(tmp_path / "run.toml")}.get(word, word) for word in command]
    (tmp_path / "run.toml").write_text('name = "x"\n')
    (tmp_path / "file").touch()
    assert f"--out {tmp_path / 'file'}" in gxpo.error(2, *argv, "--out", tmp_path / "file" / "out")


def test_a_study_that_is_missing_leads_to_an_example(tmp_path: Path, gxpo: Gxpo) -> None:
    said = gxpo.error(2, "study", "run", tmp_path / "nope.toml", "--out", tmp_path / "out")
    assert "nope.toml" in said
    assert "docs/studies.md has an example of a study file" in said


def test_eval_plays_in_the_environment_that_it_names(gxpo: Gxpo, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(cli, "run_eval", lambda args: seen.append(args) or 0)
    mine = ("eval", "--model", "starter", "--benchmark", "math500, gsm8k", "--max-new-tokens", "40")
    gxpo(*mine)
    changes = ("name=calculator", "max_turns=3", "max_observation_tokens=20")
    gxpo(*mine, *(word for change in changes for word in ("--set", f"environment.{change}")))
    gxpo(*mine, "--set", "environment.name=openenv")
    assert seen[0].benchmark == ("math500", "gsm8k")
    single, played = (evaluation._config(args)[0] for args in seen[:2])
    assert single.environment == EnvironmentConfig()
    assert played.environment == EnvironmentConfig(name="calculator", max_turns=3, max_observation_tokens=20)
    # Two observations have room in addition to the tokens of the policy.
    assert played.model.max_length == single.model.max_length + 40
    with pytest.raises(ConfigError, match=r"environment.name = .openenv. needs an address"):
        evaluation._config(seen[2])


def test_grade_prints_one_verdict_a_line_in_order(tmp_path: Path, gxpo: Gxpo) -> None:
    file = tmp_path / "in.jsonl"
    answers = ["so \\boxed{0.5}", "so \\boxed{2}", ""]
    file.write_text("".join(json.dumps({"gold": "1/2", "prediction": answer}) + "\n" for answer in answers))
    assert gxpo("grade", file, "--workers", "1", "--deadline", "60") == 0
    out, err = gxpo.printed()
    assert [json.loads(line)["verdict"] for line in out.splitlines()] == ["correct", "wrong", "unparsed"]
    assert err.strip() == "1 correct, 1 wrong, 1 unparsed, 0 timeout, 0 error"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [(Diverged("loss is NaN"), 1, "gxpo: loss is NaN\n"), (KeyboardInterrupt(), 130, "gxpo: interrupted\n")],
)
def test_an_error_becomes_one_message_and_its_exit_code(
    error: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch, gxpo: Gxpo
) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(cli, "run_report", fail)
    assert gxpo("report", "runs/a") == code
    assert gxpo.printed().err == message


def test_a_token_with_a_foreign_character_is_refused_before_it_is_sent(
    gxpo: Gxpo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GXPO_TOKEN", "gxpo_é")
    words = "gxpo: the token has a character that no token has; copy it again (--token-file FILE or GXPO_TOKEN)\n"
    assert gxpo.error(1, "runs") == words


@pytest.fixture
def paper(tmp_path: Path) -> Path:
    file = tmp_path / "paper.toml"
    apart = ["placement.learner_ranks=3", "placement.samplers=1", "placement.colocate=false"]
    file.write_text(to_toml(load_preset("paper-1.5b", apart)), encoding="utf-8")
    return file


def test_memory_time_cost_and_assumptions_are_printed_and_a_run_that_cannot_fit_ends_with_code_1(
    paper: Path, gxpo: Gxpo
) -> None:
    out = gxpo.out("plan", paper, "--gpus", "4", "--gpu", "h100-80")
    assert out.startswith("paper-1.5b on 4 × h100-80: fits\n")
    for words in ("Memory per device, learner", "Memory per device, sampler", "KV cache", "rule buffers", "GPU hours"):
        assert words in out
    assert "1,543,714,304 parameters" in out
    assert "GXPO K=5 *" in out
    assert gxpo("plan", paper, "--gpu", "a100-40", "--set", "model.gradient_checkpointing=false") == 1
    out = gxpo.printed().out
    assert "paper-1.5b on 4 × a100-40: does not fit" in out
    assert "set model.gradient_checkpointing = true." in out
    message = gxpo.error(2, "plan", paper, "--gpu", "h1000")
    assert "there is no device 'h1000'" in message
    assert "h100-80, h100-94, h200-141, b200-180, a100-40" in message


def test_a_model_is_planned_without_the_packages_of_the_trainer_unless_its_config_is_on_the_hub(
    paper: Path, gxpo: Gxpo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert gxpo("plan", paper, "--gpu", "h100-80") == 0
    gxpo.printed()
    plan = ("plan", paper, "--gpu", "h100-80", "--set")
    message = gxpo.error(2, *plan, "model.path=mine/Qwen2-9B")
    assert "model.path = 'mine/Qwen2-9B': its config is on the hub; install huggingface_hub, or use a local" in message
    message = gxpo.error(2, *plan, f"model.path={tmp_path}")
    assert str(tmp_path) in message
    assert "huggingface_hub" not in message


def test_a_host_is_planned_with_its_own_memory(tmp_path: Path, gxpo: Gxpo) -> None:
    file = tmp_path / "demo.toml"
    file.write_text(to_toml(load_preset("demo", ["placement.device=cpu"])), encoding="utf-8")
    plan = json.loads(gxpo.out("plan", file, "--format", "json"))
    assert (plan["device"], plan["fits"]) == ("cpu", True)
    assert plan["memory"][0]["limit_bytes"] > 2**30
    assert [rule["gpu_hours"] for rule in plan["rules"]] == [None, None, None]
