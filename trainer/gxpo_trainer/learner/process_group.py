"""Prerequisites of a learner rank's engine: torch.distributed and DeepSpeed's settings."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from datetime import timedelta
from typing import Any, Literal

import torch

from gxpo_trainer.learner.deepspeed_internals import silence_memory_reports, skip_compiled_ops

Device = Literal["cpu", "gpu"]
MAX_BUCKET = 50_000_000
"""Most elements DeepSpeed reduces at once. Its default of 5e8 reserves 2 GB of buffer whatever the model's size."""


def join_process_group(*, rank: int, world_size: int, master_address: str, master_port: int, device: Device) -> None:
    """Join the ranks of one learner: gloo on CPUs, NCCL on GPUs. Does nothing when the process has joined already.

    Raises RuntimeError when the process belongs to a group of another size.
    """
    # Read by DeepSpeed at its import and at initialize; a launcher would set them.
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if device == "cpu" else "cuda")
    local_rank = 0 if device == "cpu" else rank % torch.cuda.device_count()
    os.environ["LOCAL_RANK"] = str(local_rank)
    if device == "gpu":
        torch.cuda.set_device(local_rank)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo" if device == "cpu" else "nccl",
            init_method=f"tcp://{master_address}:{master_port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(minutes=30),
        )
    elif torch.distributed.get_world_size() != world_size:
        raise RuntimeError(
            f"this process is one of {torch.distributed.get_world_size()} ranks already, "
            f"but the learner has {world_size}; start each learner in separate processes"
        )
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.WARNING)
    deepspeed.utils.logger.addFilter(_is_news)
    warnings.filterwarnings("ignore", message="`torch.distributed.*is deprecated", category=FutureWarning)
    if device == "cpu":
        skip_compiled_ops()
    deepspeed.init_distributed("gloo" if device == "cpu" else "nccl", auto_mpi_discovery=False, verbose=False)


def _is_news(record: logging.LogRecord) -> bool:
    """False for DeepSpeed's warning about every optimizer that is not its own: torch's are the ones tested here."""
    return "untested optimizer" not in record.getMessage()


def initialize_engine(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer | None, settings: dict[str, Any]
) -> Any:  # deepspeed.DeepSpeedEngine, which has no types
    """`deepspeed.initialize`; what it prints goes to the debug log."""
    import deepspeed

    silence_memory_reports()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
    logging.getLogger(__name__).debug("%s", printed.getvalue())
    return engine


def deepspeed_settings(*, zero_stage: int, precision: str, num_trainable: int, device: Device) -> dict[str, Any]:
    """DeepSpeed's configuration. Clipping, schedule and accumulation are disabled, because the learner does them."""
    bucket = min(max(num_trainable, 1024), MAX_BUCKET)
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": precision == "bf16"},
        # Sums over micro-batches and ranks in fp32: in bf16 their rounding errors would exceed the differences between
        # two gradients.
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": {
            "stage": zero_stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": 2 * ((bucket + 1) // 2),
            "overlap_comm": device == "gpu",
            "stage3_prefetch_bucket_size": bucket,
            # Norms and biases stay whole on every rank; matrices are gathered when a layer needs them.
            "stage3_param_persistence_threshold": min(10_000, num_trainable // 100),
        },
    }


def build_optimizer(parameters: list[torch.nn.Parameter], settings: Any) -> torch.optim.Optimizer:
    """The base optimizer of `learner.optimizer` (config.OptimizerConfig) over one group of parameters."""
    if settings.name == "adamw":
        # Fused: one pass over θ, m, v, g without temporaries, on CPUs too.
        return torch.optim.AdamW(
            parameters,
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            fused=True,
        )
    return torch.optim.SGD(
        parameters,
        lr=settings.learning_rate,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        fused=True,
    )
