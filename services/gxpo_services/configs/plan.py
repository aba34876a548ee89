"""The plan of a submitted config: memory, time and cost before it starts (gxpo_trainer.planner)."""

from __future__ import annotations

from gxpo_services.settings import ServiceSettings
from gxpo_trainer.config import RunConfig
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.planner import Plan, inputs_of, make_plan, refusal
from gxpo_trainer.planner.devices import CPU, DEFAULT_GPU, device_named
from gxpo_trainer.planner.heads import uneven_split
from gxpo_trainer.planner.report import PlanView, view_of
from gxpo_trainer.planner.shapes import read_shape


def planned(config: RunConfig, server: ServiceSettings) -> tuple[PlanView | None, str | None]:
    """The plan, or why there is none."""
    try:
        return view_of(_plan(config, server)), None
    except ConfigError as error:
        return None, str(error)


def cannot_split(config: RunConfig) -> list[tuple[str, str]]:
    """(setting, reason) where the heads of the model do not divide among the devices of an engine.

    Empty for models of unknown shape, which the trainer checks when it has them.
    """
    try:
        shape = read_shape(config.model.path)
    except ConfigError:
        return []
    tensor_parallel = config.placement.tensor_parallel
    sentence = uneven_split(shape.heads, shape.kv_heads, tensor_parallel, repr(config.model.path))
    return [] if sentence is None else [("placement.tensor_parallel", sentence)]


def cannot_fit(config: RunConfig, server: ServiceSettings) -> list[tuple[str, str]]:
    """(setting, the planner's sentence) for a run that cannot fit on the GPUs of this server's cluster.

    Empty where their kind is not set (GXPO_GPU), for runs without GPUs, and for models of unknown shape.
    """
    if server.gpu is None or config.placement.device == "cpu":
        return []
    try:
        sentence = refusal(_plan(config, server))
    except ConfigError:
        return []
    return [] if sentence is None else [("placement", sentence)]


def _plan(config: RunConfig, server: ServiceSettings) -> Plan:
    on_gpu = config.placement.device == "gpu" or (config.placement.device == "auto" and server.gpu is not None)
    device = device_named(server.gpu or DEFAULT_GPU) if on_gpu else device_named(CPU)
    return make_plan(inputs_of(config, read_shape(config.model.path), device))
