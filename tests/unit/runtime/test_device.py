"""`placement.device = "auto"`: what decides, what is reported about it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from gxpo_trainer.config import RunConfig
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.runtime import placement as placement_module
from gxpo_trainer.runtime.placement import Placement


@pytest.fixture(autouse=True)
def head_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def decide(rollout: dict[str, Any] | None = None, **settings: Any) -> Placement:
    body = {"placement": {"ray_address": "head:6379", **settings}, "rollout": rollout or {}}
    return Placement.decide(RunConfig.model_validate(body))


def settle(placement: Placement, **cluster: float) -> Placement:
    return placement.settle({"CPU": 16.0, **cluster})


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
    monkeypatch.setattr(placement_module, "_library_cuda", lambda: library)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: driver)


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


def test_an_evaluation_reserves_engines_and_no_learner() -> None:
    config = RunConfig.model_validate({"placement": {"ray_address": "head:6379", "sampler_cpus": 0.5}})
    engines = config.placement.model_copy(update={"learner_ranks": 0})
    placement = settle(Placement.decide(config.model_copy(update={"placement": engines})), GPU=1)
    bundles = placement.bundles()
    assert (placement.device, placement.colocated, placement.num_gpus) == ("gpu", False, 1)
    assert bundles.resources == ({"CPU": 0.75, "GPU": 1},)
    assert (bundles.learner, bundles.engines) == ((), (0,))
    placement.check_fits({"CPU": 0.75, "GPU": 1.0})
