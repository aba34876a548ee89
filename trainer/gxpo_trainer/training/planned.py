"""What the planner decides before a run's engines start: refusal, and whether shared GPUs hold everything at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gxpo_trainer.cluster.placement import Placement
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.planner import fits_resident, inputs_of, make_plan, refusal
from gxpo_trainer.planner.devices import device_of_cluster
from gxpo_trainer.planner.shapes import read_folder


def check_memory(placement: Placement, model_folder: str, cluster: Mapping[str, float]) -> None:
    """Raise ConfigError (`no_resources`) with the planner's sentence for a run that cannot fit, else set
    `placement.resident`.

    Nothing is checked on CPUs, on GPUs that the planner does not know, and for models whose shape it cannot read.
    """
    config = placement.config
    device = device_of_cluster(cluster)
    if placement.device != "gpu" or device is None:
        return
    try:
        shape = read_folder(Path(model_folder), config.model.path)
    except ConfigError:
        return
    plan = make_plan(inputs_of(config, shape, device, placement.num_gpus))
    placement.resident = fits_resident(plan)
    sentence = refusal(plan)
    if sentence is not None:
        raise ConfigError(sentence, reason="no_resources")
