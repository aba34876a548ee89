"""`gxpo plan`: what it prints, its exit codes, and one message an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gxpo_trainer import cli
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import load_preset, to_toml


def run(*argv: str | Path) -> int:
    return cli.main(["plan", *(str(part) for part in argv)])


@pytest.fixture
def paper(tmp_path: Path) -> Path:
    file = tmp_path / "paper.toml"
    apart = ["placement.learner_ranks=3", "placement.samplers=1", "placement.colocate=false"]
    file.write_text(to_toml(load_preset("paper-1.5b", apart)), encoding="utf-8")
    return file


def planned(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, dict[str, Any]]:
    code = run(*argv, "--format", "json")
    return code, json.loads(capsys.readouterr().out)


def test_memory_time_cost_and_assumptions_are_printed(paper: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(paper, "--gpus", "4", "--gpu", "h100-80") == 0
    out = capsys.readouterr().out
    assert out.startswith("paper-1.5b on 4 × h100-80: fits\n")
    for words in ("Memory per device, learner", "Memory per device, sampler", "KV cache", "rule buffers", "GPU hours"):
        assert words in out
    assert "1,543,714,304 parameters" in out
    assert "GXPO K=5 *" in out


def test_a_run_that_does_not_fit_ends_with_code_1_and_the_setting(
    paper: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(paper, "--gpu", "a100-40", "--set", "model.gradient_checkpointing=false") == 1
    out = capsys.readouterr().out
    assert "paper-1.5b on 4 × a100-40: does not fit" in out
    assert "set model.gradient_checkpointing = true." in out


def test_four_gpus_are_shared_by_as_many_ranks_and_samplers(paper: Path, capsys: pytest.CaptureFixture[str]) -> None:
    even = ("placement.learner_ranks=4", "placement.samplers=4", "placement.colocate=auto")
    code, found = planned(capsys, paper, "--gpus", "4", *(part for change in even for part in ("--set", change)))
    assert (code, found["devices_needed"], found["shared_devices"], found["resident"]) == (0, 4, True, True)
    assert run(paper, "--gpus", "4", *(part for change in even for part in ("--set", change))) == 0
    assert "Learner and sampler stay on their shared devices." in capsys.readouterr().out


def test_as_many_gpus_as_asked_for_are_planned(paper: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = planned(capsys, paper, "--gpu", "h100-80", "--set", "placement.learner_ranks=7")
    assert (code, found["num_devices"], found["devices_needed"]) == (0, 8, 8)
    own = next(rule for rule in found["rules"] if rule["own"])
    assert own["gpu_hours"] == pytest.approx(8 * own["hours"])
    assert own["seconds"]["step"] == pytest.approx(sum(own["seconds"].values()) - own["seconds"]["step"])


def test_a_host_is_planned_with_its_own_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "demo.toml"
    file.write_text(to_toml(load_preset("demo", ["placement.device=cpu"])), encoding="utf-8")
    code, found = planned(capsys, file)
    assert (code, found["device"]) == (0, "cpu")
    assert found["memory"][0]["limit_bytes"] > 2**30
    assert [rule["gpu_hours"] for rule in found["rules"]] == [None, None, None]


def test_an_unknown_gpu_names_the_known_ones(paper: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(paper, "--gpu", "h1000") == 2
    message = capsys.readouterr().err
    assert "there is no device 'h1000'" in message
    assert "h100-80, h100-94, h200-141, b200-180, a100-40" in message


def test_a_model_folder_without_a_config_is_named(
    paper: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(paper, "--set", f"model.path={tmp_path}") == 2
    assert f"model.path = '{tmp_path}' has no config.json" in capsys.readouterr().err


def test_an_engine_that_cannot_split_the_heads_is_refused(paper: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Qwen2.5-1.5B: 12 heads, 2 key/value heads.
    assert run(paper, "--set", "placement.tensor_parallel=3") == 2
    assert (
        "placement.tensor_parallel = 3 does not divide the 12 attention heads and 2 key/value heads of "
        "'Qwen/Qwen2.5-1.5B-Instruct'; set it to one of 1, 2, 4, 6, 12" in capsys.readouterr().err
    )


def test_zero_gpus_are_bad_usage(paper: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        run(paper, "--gpus", "0")
    assert ended.value.code == 2


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
    _, found = planned(capsys, file, "--calibrate", measured)
    own = next(rule for rule in found["rules"] if rule["own"])
    assert own["seconds"]["sampling"] == pytest.approx(2.0)
    assert own["seconds"]["passes"] + own["seconds"]["look_ahead"] == pytest.approx(7.0)
    assert own["seconds"]["step"] == pytest.approx(10.0)
    assert any("calibrated to measured" in line for line in found["assumptions"])


def test_a_folder_that_is_no_run_cannot_calibrate(
    paper: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(paper, "--calibrate", tmp_path / "nothing") == 2
    assert "nothing has no config.toml; name the output folder of a run" in capsys.readouterr().err
