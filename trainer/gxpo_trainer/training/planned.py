"""What the planner decides before a run's engines start: refusal, and whether shared GPUs hold everything at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gxpo_trainer.cluster.placement import Placement
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.planner import fits_resident, inputs_of, make_plan, refusal
from gxpo_trainer.planner.devices import devices_of_cluster
from gxpo_trainer.planner.shapes import read_folder


def check_memory(placement: Placement, model_folder: str, cluster: Mapping[str, float]) -> None:
    """Raise ConfigError (`no_resources`) with the planner's sentence for a run that cannot fit, else set
    `placement.resident`.

    Where Ray's name for the GPUs stands for several memory sizes, a run is refused only when it fits none of them, and
    resident only when it is on all of them. Nothing is checked on CPUs, on GPUs that the planner does not know, and for
    models whose shape it cannot read; nor while the cluster has fewer GPUs than the run needs, because those that join
    may be of another kind.
    """
    config = placement.config
    devices = devices_of_cluster(cluster)
    if placement.device != "gpu" or not devices or cluster.get("GPU", 0) < placement.num_gpus:
        return
    try:
        shape = read_folder(Path(model_folder), config.model.path)
    except ConfigError:
        return
    plans = [make_plan(inputs_of(config, shape, device, placement.num_gpus)) for device in devices]
    placement.resident = all(fits_resident(plan) for plan in plans)
    sentences = [refusal(plan) for plan in plans]
    if None not in sentences:
        raise ConfigError(sentences[-1], reason="no_resources")
