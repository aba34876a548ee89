"""Bundles of a run's placement group and the bundle of each actor; the reservation itself is tested with Ray."""

from __future__ import annotations

import errno
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import ray
from ray.exceptions import RayTaskError

from gxpo_trainer.config import RunConfig
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.planner import devices
from gxpo_trainer.reporting.outcome import failure_message, reason_of
from gxpo_trainer.runtime import placement as placement_module
from gxpo_trainer.runtime.placement import Placement
from gxpo_trainer.runtime.placement_group import Bundles, RunPlacementGroup, missing, result_of, unplaced


def placement(device: str = "cpu", **settings: Any) -> Placement:
    config = RunConfig.model_validate({"placement": {"device": "cpu", **settings}})
    return Placement(config, "gpu" if device == "gpu" else "cpu", 1, 1, colocated=settings.get("colocate") is True)


@pytest.mark.parametrize(
    ("settings", "cluster", "shares"),
    [
        ({}, {"CPU": 2.0}, (1.0, 0.75, 0.25)),
        ({"samplers": 4}, {"CPU": 64.0}, (1.0, 0.75, 0.25)),
        # 1 + 2 · 0.75 + 0.25 = 2.75 in 2: 8/11 of each.
        ({"samplers": 2}, {"CPU": 2.0}, (0.7272, 0.5454, 0.1818)),
        # 2 − 0.5 for 1.75 of the others: 6/7 of each.
        ({"samplers": 2, "learner_cpus": 0.5}, {"CPU": 2.0}, (0.5, 0.6428, 0.2142)),
        # Workers are still to join.
        ({"samplers": 2}, {"CPU": 0.0}, (1.0, 0.75, 0.25)),
        # Explicit numbers are kept, and refused where they do not fit.
        ({"learner_cpus": 2.0, "sampler_cpus": 1.0}, {"CPU": 2.0}, (2.0, 1.0, 0.25)),
    ],
)
def test_automatic_shares_fit(settings: dict[str, Any], cluster: dict[str, float], shares: tuple[float, ...]) -> None:
    settled = placement(**settings).settle(cluster)
    assert tuple(settled.cpus) == pytest.approx(shares, abs=1e-9)
    assert settled.learner_options()["num_cpus"] == settled.cpus.learner
    if sum(shares) < 2 and cluster["CPU"]:
        settled.check_fits(cluster)
        assert ("lowered to fit" in settled.cpus_in_words) is (shares != (1.0, 0.75, 0.25))


ENGINES = {"sampler_cpus": 0.5, "verifier_cpus": 0.25}


@pytest.mark.parametrize(
    ("settings", "bundles"),
    [
        # A bundle for each rank and each engine; the verifier is with the first engine.
        (
            {"samplers": 2, "tensor_parallel": 2, **ENGINES},
            Bundles(({"CPU": 1, "GPU": 1}, {"CPU": 0.75, "GPU": 2}, {"CPU": 0.5, "GPU": 2}), "PACK", (0,), (1, 2)),
        ),
        # An engine and its ranks in one.
        (
            {"colocate": True, "learner_ranks": 4, "samplers": 2, "tensor_parallel": 2, **ENGINES},
            Bundles(({"CPU": 2.75, "GPU": 2}, {"CPU": 2.5, "GPU": 2}), "PACK", (0, 0, 1, 1), (0, 1)),
        ),
        # All ranks on another node than the engines.
        (
            {"strategy": "split", "learner_ranks": 4, "learner_cpus": 2, "samplers": 3},
            Bundles(({"CPU": 8, "GPU": 4}, {"CPU": 2.5, "GPU": 3}), "STRICT_SPREAD", (0, 0, 0, 0), (1, 1, 1)),
        ),
    ],
)
def test_bundles_of_each_kind_of_placement(settings: dict[str, Any], bundles: Bundles) -> None:
    assert placement("gpu", **settings).bundles() == bundles


@pytest.mark.parametrize(
    ("settings", "learner", "engines"),
    [({"samplers": 2}, [0, 1, 2], [3, 4]), ({"strategy": "split", "samplers": 2}, [0, 0, 0], [1, 1])],
)
def test_each_process_uses_its_bundle(settings: dict[str, Any], learner: list[int], engines: list[int]) -> None:
    decided = placement(learner_ranks=3, **settings)
    decided = replace(decided, group=RunPlacementGroup(object(), decided.bundles()))
    ranks = [decided.learner_options(rank)["scheduling_strategy"] for rank in range(3)]
    assert [strategy.placement_group_bundle_index for strategy in ranks] == learner
    samplers = [decided.sampler_options(index)["scheduling_strategy"] for index in range(2)]
    assert [strategy.placement_group_bundle_index for strategy in samplers] == engines
    verifier = decided.verifier_options()
    assert verifier["scheduling_strategy"].placement_group_bundle_index == engines[0]
    assert verifier["max_concurrency"] == 10_000, "Ray limits no requests of components over HTTP"


@pytest.mark.parametrize(
    ("settings", "available", "nodes", "words"),
    [
        ({"samplers": 3}, {"CPU": 16, "GPU": 1}, 1, "3 GPUs"),
        ({"samplers": 3}, {"CPU": 3, "GPU": 3}, 1, "1 GPU and 0.5 CPUs"),
        ({"samplers": 3}, {}, 0, "4 GPUs and 3.5 CPUs"),
        ({"samplers": 1}, {"CPU": 2, "GPU": 2}, 2, "a node with 1 GPU and 1 CPU"),
        ({"strategy": "split"}, {"CPU": 16, "GPU": 8}, 1, "a second node"),
        # What another run holds of the only node would not be enough.
        ({"strategy": "split"}, {"CPU": 1, "GPU": 1}, 1, "a second node"),
        ({"strategy": "split"}, {"CPU": 1.5, "GPU": 2}, 2, "0.5 CPUs"),
        ({"strategy": "split"}, {"CPU": 16, "GPU": 8}, 2, "a node with 1 GPU and 1 CPU"),
        # One GPU on each node: more of them never hold an engine over two.
        ({"tensor_parallel": 2}, {"CPU": 32, "GPU": 4}, 4, "a node with 2 GPUs and 1 CPU"),
    ],
)
def test_a_run_that_waits_says_for_what(
    settings: dict[str, Any], available: dict[str, float], nodes: int, words: str
) -> None:
    # One rank with 1 CPU; engines with 0.75 each; 0.25 for the verifier.
    assert missing(placement("gpu", **settings).bundles(), available, nodes) == words


@pytest.mark.parametrize(
    ("settings", "nodes", "words"),
    [
        (
            {"samplers": 1},
            [],
            "requires 2 × (1 GPU and 1 CPU), which Ray could not reserve within 600 s; its nodes have nothing: lower "
            "the placement settings, add nodes with at least 1 GPU and 1 CPU, or raise placement.wait_s",
        ),
        (
            {"tensor_parallel": 2, "strategy": "split"},
            [{"CPU": 8, "GPU": 1}] * 8,
            "on separate nodes, which Ray could not reserve within 600 s; its nodes have 8 × (1 GPU and 8 CPUs): lower "
            'the placement settings, set placement.strategy = "pack", add nodes with at least 2 GPUs and 1 CPU, or '
            "raise placement.wait_s",
        ),
    ],
)
def test_a_run_that_waited_says_what_helps(settings: dict[str, Any], nodes: list[dict[str, float]], words: str) -> None:
    error = unplaced(placement("gpu", **settings).bundles(), nodes, 600.0)
    assert str(error).endswith(words)
    assert error.reason == "no_resources"


def test_an_error_of_an_actor_has_its_message_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    causes = [ConfigError("model.path: no place for a", reason="setup_failed"), ValueError("b")]
    raised = [RayTaskError("receive", "Traceback", cause).as_instanceof_cause() for cause in causes]
    monkeypatch.setattr(ray, "get", Mock(side_effect=raised))
    with pytest.raises(ConfigError) as caught:
        result_of(object())
    assert failure_message(caught.value) == "model.path: no place for a"
    assert reason_of(caught.value) == "setup_failed"
    assert isinstance(caught.value.__cause__, RayTaskError), "for the log"
    with pytest.raises(RayTaskError):
        result_of(object())


# Writes that fail within libraries in Rust.


WRITES = {
    "safetensors": "import torch; from safetensors.torch import save_file\n"
    "write = lambda path: save_file({'a': torch.zeros(1000)}, path)\n",
    "tokenizers": "from tokenizers import Tokenizer, models\n"
    "write = Tokenizer(models.WordLevel({str(n): n for n in range(1000)}, unk_token='0')).save\n",
    "python": "from pathlib import Path\nwrite = lambda path: Path(path).write_text('a' * 2000)\n",
}


@pytest.mark.parametrize("library", WRITES)
def test_a_failed_write_has_its_error_number(tmp_path: Path, library: str) -> None:
    code = WRITES[library] + (
        "import resource, sys; from gxpo_trainer.runtime.processes import write_errors\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        "    with write_errors(): write(sys.argv[1])\n"
        "except OSError as error: print(error.errno)\n"
    )
    printed = subprocess.check_output([sys.executable, "-c", code, str(tmp_path / "file")], text=True)
    assert printed.split() == [str(errno.EFBIG)]


# placement.device = "auto": what decides, what is reported about it, and what is refused.


@pytest.fixture(autouse=True)
def head_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def decide(rollout: dict[str, Any] | None = None, **settings: Any) -> Placement:
    body = {"placement": {"ray_address": "head:6379", **settings}, "rollout": rollout or {}}
    return Placement.decide(RunConfig.model_validate(body))


def settle(placement: Placement, **cluster: float) -> Placement:
    return placement.settle({"CPU": 16.0, **cluster})


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("200000 100000", 2), ("150000 100000", 1), ("50000 100000", 1), ("6400000 100000", 8), ("max 100000", 8),
     ("", 8), (None, 8)],
)  # fmt: skip
def test_the_quota_of_a_container_limits_its_cores(
    quota: str | None, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {*range(8)})
    monkeypatch.setattr(devices, "CPU_QUOTA", tmp_path / "cpu.max")
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    decided = decide(learner_ranks=1, samplers=2)
    threads = decided.learner_threads, decided.sampler_threads
    assert (devices.usable_cores(), *threads) == (cores, cores, max(1, cores // 2))


def test_gpus_that_join_later_change_device_and_bundles() -> None:
    placement = settle(decide(learner_ranks=2, samplers=2))
    assert (placement.device, placement.num_gpus) == ("cpu", 0)
    placement = settle(placement, GPU=2)
    assert (placement.device, placement.colocated, placement.num_gpus) == ("gpu", True, 2)
    placement = settle(placement, GPU=4)
    assert (placement.colocated, placement.num_gpus) == (False, 4)
    assert placement.device_reason == 'placement.device = "auto" and 4 GPUs in the Ray cluster'
    assert placement.learner_options()["num_gpus"] == 1
    assert [bundle["GPU"] for bundle in placement.bundles().resources] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("rollout", "settings"), [({"async_depth": 1}, {}), ({}, {"weight_transport": "nccl"}), ({}, {"colocate": False})]
)
def test_what_needs_gpus_of_its_own_does_not_share_them(rollout: dict[str, Any], settings: dict[str, Any]) -> None:
    placement = settle(decide(rollout, learner_ranks=2, samplers=2, **settings), GPU=2)
    assert (placement.colocated, placement.num_gpus) == (False, 4), "an autoscaler sees what would do"
    with pytest.raises(ConfigError, match=r"requires 4 GPUs .* but Ray has 2"):
        placement.check_fits({"CPU": 16, "GPU": 2})


def test_what_a_cluster_without_gpus_leaves_open_or_rules_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="needs GPUs"):
        settle(decide(weight_transport="nccl"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ConfigError, match="2 GPUs are visible on this machine and the Ray cluster has none"):
        settle(decide())


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_device_that_is_named_stays(device: str) -> None:
    placement = settle(decide(device=device), GPU=4 if device == "cpu" else 0)
    assert (placement.device, placement.device_reason) == (device, f'placement.device = "{device}"')


def use_driver(monkeypatch: pytest.MonkeyPatch, driver: str, cuda: str, library: int = 0) -> None:
    """One GPU with this driver, torch's build for this CUDA, and the CUDA of the driver's library."""
    from ray._private.thirdparty import pynvml

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(placement_module, "torch_cuda", lambda: cuda)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: driver)
    monkeypatch.setattr(pynvml, "nvmlSystemGetCudaDriverVersion_v2", lambda: 1000 * library + 20)


@pytest.mark.parametrize("device", ["auto", "gpu"])
def test_a_driver_too_old_for_torch_is_refused_with_the_right_one(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_driver(monkeypatch, "580.65.06", "13.0")
    placement = Placement.decide(RunConfig())
    assert placement.device == "gpu"
    assert placement.device_reason == 'placement.device = "auto" and 1 GPU visible on this machine'
    use_driver(monkeypatch, "570.86.15", "13.0", library=12)
    config = RunConfig.model_validate({"placement": {"device": device}})
    with pytest.raises(ConfigError, match=r"driver 570\.86\.15 .* 580 or newer.* or set placement\.device = \"cpu\""):
        Placement.decide(config)
    cpu = config.model_copy(update={"placement": config.placement.model_copy(update={"device": "cpu"})})
    assert Placement.decide(cpu).device == "cpu"
    use_driver(monkeypatch, "570.86.15", "12.9")
    assert Placement.decide(config).device == "gpu"
    use_driver(monkeypatch, "570.86.15", "13.0", library=13)
    assert Placement.decide(config).device == "gpu", "NVIDIA's forward compatibility package"


def test_gpus_that_a_build_for_cpus_cannot_use_leave_the_run_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU and the CPU environment, whose Ray counts the GPU all the same."""
    assert placement_module.torch_cuda() is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    placement = Placement.decide(RunConfig())
    for decided in (placement, settle(placement, GPU=1)):
        assert decided.device == "cpu"
        assert decided.device_reason.endswith("`make setup DEVICE=gpu` installs the one for GPUs")
    with pytest.raises(ConfigError, match="torch is its build for CPUs here"):
        Placement.decide(RunConfig.model_validate({"placement": {"device": "gpu"}}))


def test_time_outs_are_those_of_the_settings_where_no_watch_is_given() -> None:
    config = RunConfig.model_validate({"timeouts": {"setup_s": 7200.0, "evaluating_s": 60.0}})
    assert Placement.decide(config).group.watch.timeouts == config.timeouts


def test_an_evaluation_reserves_engines_and_no_learner() -> None:
    config = RunConfig.model_validate({"placement": {"ray_address": "head:6379", "sampler_cpus": 0.5}})
    engines = config.placement.model_copy(update={"learner_ranks": 0})
    placement = settle(Placement.decide(config.model_copy(update={"placement": engines})), GPU=1)
    bundles = placement.bundles()
    assert (placement.device, placement.colocated, placement.num_gpus) == ("gpu", False, 1)
    assert bundles.resources == ({"CPU": 0.75, "GPU": 1},)
    assert (bundles.learner, bundles.engines) == ((), (0,))
    placement.check_fits({"CPU": 0.75, "GPU": 1.0})
