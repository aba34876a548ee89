"""The phases of GPUs that learner and engines share: every transition, and a death in each phase.

The doubles stand for what a GPU would do; they check that both sides never hold their large memory at once.
"""

from __future__ import annotations

import itertools
from typing import Any, Literal, cast
from unittest.mock import Mock

import pytest

from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.io import load_preset
from gxpo_trainer.errors import LearnerDied
from gxpo_trainer.planner import inputs_of, make_plan
from gxpo_trainer.planner.devices import device_named
from gxpo_trainer.planner.inputs import read_shape
from gxpo_trainer.planner.memory import released_parts
from gxpo_trainer.planner.plan import Fit
from gxpo_trainer.runtime.shared_devices import Phase, ResidentDevices, SharedDevices

PHASES: tuple[Phase, ...] = ("sampling", "updating", "syncing")


class Gpu:
    """Engines and learner in one, with the memory that each holds."""

    def __init__(self) -> None:
        self.engine_weights: Literal["held", "host", "lost"] = "held"
        self.kv_cache, self.learner = True, False
        self.learner_alive = self.engines_alive = True
        self.log: list[str] = []

    def sleep(self, *, discard_weights: bool) -> None:
        self.log.append("sleep 2" if discard_weights else "sleep 1")
        assert self.engines_alive
        self.kv_cache = False
        if self.engine_weights == "held":
            self.engine_weights = "lost" if discard_weights else "host"

    def wake(self, what: str) -> None:
        self.log.append(f"wake {what}")
        if what == "kv_cache" and not self.engines_alive:
            assert not self.learner, "an engine that starts needs the memory that the learner holds"
            self.engines_alive, self.engine_weights, self.kv_cache = True, "held", True
        elif not self.engines_alive:
            return
        elif what == "weights":
            self.engine_weights = "held"
        else:
            assert self.engine_weights == "held", "the weights come before the KV cache"
            assert not self.learner, "the KV cache needs the memory that the learner holds"
            self.kv_cache = True

    def park(self) -> None:
        self.log.append("park")
        self.learner = False

    def trim(self) -> None:
        self.log.append("trim")
        assert self.learner

    def unpark(self) -> None:
        if not self.learner_alive:
            raise LearnerDied("killed")
        assert not self.kv_cache, "the learner needs the memory that the KV cache holds"
        self.log.append("unpark")
        self.learner = True


class Ledger(Gpu):
    """What learner and engine have reserved, by the parts of a plan, held against its phases at each change.

    torch's allocator keeps what was freed until it is told to release it.
    """

    def __init__(self, fit: Fit, released: frozenset[str]) -> None:
        super().__init__()
        self.phases = {phase.name: phase for phase in fit.phases}
        update = self.phases["update"].parts
        self.learner_parts = {name: size for name, size in update.items() if name != "sampler asleep"}
        self.released, self.asleep = released, update["sampler asleep"]
        self.idle = {name: update[name] for name in ("runtime", "published weights")}
        self.weights = fit.sampler.weights
        self.on_gpu = dict(self.idle)
        self.reserved: dict[str, int] = {}

    def record(self, phase: str, engine: int) -> None:
        self.reserved[phase] = sum(self.on_gpu.values()) + engine
        assert self.reserved[phase] <= self.phases[phase].limit, f"{phase}: out of memory"

    def unpark(self) -> None:
        super().unpark()
        self.on_gpu = dict(self.learner_parts)  # and a step is taken, whose pass ends with its memory cached
        self.record("update", self.asleep)

    def trim(self) -> None:
        super().trim()
        self.on_gpu = {name: size for name, size in self.on_gpu.items() if name not in self.released}

    def park(self) -> None:
        super().park()
        self.on_gpu = dict(self.idle)

    def wake(self, what: str) -> None:
        super().wake(what)
        if what == "weights":
            self.record("sync", self.asleep + self.weights)
        else:
            self.record("sampling", self.phases["sampling"].num_bytes - sum(self.idle.values()))


def test_what_is_reserved_in_each_phase_is_what_the_planner_counts() -> None:
    """GXPO on all weights of 7 B, ZeRO-2 in bf16, four 80 GB GPUs that learner and engines share. Before the pass's
    memory was released, 88.6 GiB of 79.6 were needed for a sync."""
    preset = load_preset("paper-7b-lora").model_dump()
    preset["learner"] |= {"lora": None, "loss": preset["learner"]["loss"] | {"kl_beta": 0.0}}
    config = RunConfig.model_validate(preset)
    inputs = inputs_of(config, read_shape(config.model.path), device_named("h100-80"), 4)
    fit = make_plan(inputs).fit
    ledger = Ledger(fit, released_parts(inputs))
    devices = SharedDevices(cast(Any, ledger), cast(Any, ledger), adapters=False)
    devices.need("updating", sync_follows=True)
    devices.need("syncing")
    devices.need("sampling")
    assert ledger.reserved == {phase.name: phase.num_bytes for phase in fit.phases}
    ledger.on_gpu = dict(ledger.learner_parts)
    with pytest.raises(AssertionError, match="sync: out of memory"):
        ledger.record("sync", ledger.asleep + ledger.weights)


def shared(*, adapters: bool = False) -> tuple[Gpu, SharedDevices]:
    """After the start: the engines were built, slept, and the learner is on the GPU."""
    gpu = Gpu()
    devices = SharedDevices(cast(Any, gpu), cast(Any, gpu), adapters=adapters)
    devices.learner_starts()
    gpu.learner = True
    gpu.log.clear()
    return gpu, devices


def go_through(devices: SharedDevices, *phases: Phase) -> None:
    """The phases of a step: a sync follows each update."""
    for phase in phases:
        devices.need(phase, sync_follows=phase == "updating")


def check(gpu: Gpu, phase: Phase) -> None:
    expected = {"sampling": ("held", True, False), "updating": (None, False, True), "syncing": ("held", False, True)}
    weights, kv_cache, learner = expected[phase]
    assert (gpu.kv_cache, gpu.learner) == (kv_cache, learner)
    assert weights is None or gpu.engine_weights == weights


@pytest.mark.parametrize("path", [*itertools.product(PHASES, repeat=4)])
def test_every_path_of_phases_ends_with_the_right_memory(path: tuple[Phase, ...]) -> None:
    gpu, devices = shared()
    for phase in path:
        devices.need(phase)
        check(gpu, phase)


def test_one_training_step_moves_each_side_once() -> None:
    gpu, devices = shared()
    go_through(devices, "syncing", "sampling")
    gpu.log.clear()
    go_through(devices, "updating")
    with pytest.raises(RuntimeError, match="weights were released; sync before sampling"):
        devices.need("sampling")
    go_through(devices, "syncing", "sampling")
    assert gpu.log == ["sleep 2", "unpark", "trim", "wake weights", "park", "wake kv_cache"]


def test_adapters_never_give_up_the_base_weights() -> None:
    gpu, devices = shared(adapters=True)
    go_through(devices, "syncing", "sampling", "updating", "syncing", "sampling", "syncing")
    assert "sleep 2" not in gpu.log


@pytest.mark.parametrize("phase", PHASES)
def test_a_learner_that_died_in_any_phase_starts_on_free_gpus(phase: Phase) -> None:
    gpu, devices = shared()
    devices.need(phase)
    gpu.learner_alive = gpu.learner = False
    if phase == "sampling":
        with pytest.raises(LearnerDied):
            devices.need("updating", sync_follows=True)
    devices.learner_starts()
    assert not gpu.kv_cache
    assert gpu.engine_weights != "held" or phase == "updating"
    gpu.learner_alive = gpu.learner = True
    go_through(devices, "syncing", "sampling")
    check(gpu, "sampling")


@pytest.mark.parametrize("phase", ["updating", "syncing"])
def test_engines_that_all_died_beside_the_learner_start_when_it_has_left(phase: Phase) -> None:
    gpu, devices = shared()
    go_through(devices, "syncing", "sampling", "updating")
    devices.need(phase)
    gpu.engines_alive, gpu.kv_cache = False, False
    devices.engines_start()
    check(gpu, "sampling")
    # They load weights as they start, so that nothing is missing without a sync.
    devices.need("updating")
    devices.need("sampling")
    check(gpu, "sampling")
    devices.need("syncing")
    check(gpu, "syncing")


@pytest.mark.parametrize("path", [*itertools.product(PHASES, repeat=3)])
def test_engines_beside_a_resident_learner_start_while_it_is_idle_only(path: tuple[Phase, ...]) -> None:
    """An engine takes memory that changes while it starts for its own: its KV cache shrinks, or vLLM gives up."""
    allowed = [True]
    engines: Any = Mock(hold_starts=lambda: allowed.append(False), allow_starts=lambda: allowed.append(True))
    devices = ResidentDevices(engines)
    devices.learner_starts()
    assert not allowed[-1]
    for phase in path:
        devices.need(phase)
        assert allowed[-1] == (phase == "sampling")
    devices.engines_start()
    assert allowed[-1]
