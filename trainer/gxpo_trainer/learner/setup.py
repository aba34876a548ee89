"""What a learner rank is built from: the process group, the policy's attention, its loading, the DeepSpeed engine, and
the frozen start policy of the KL term.

No rank holds more of a policy than it keeps, also while it is loaded. Up to stage 2 transformers builds the model
without memory and fills it tensor by tensor, on a GPU directly there; at stage 3 every layer is partitioned as it is
built, and rank 0 reads the files.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import warnings
from collections.abc import Iterable, Iterator
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gxpo_trainer.algo.packing import Layout, MicroBatch
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.engines import GRADIENT_BUCKET
from gxpo_trainer.data.checks import teacher_errors
from gxpo_trainer.errors import ConfigError
from gxpo_trainer.learner.logprobs import (
    NAME,
    VARIABLE_LENGTH,
    WINDOWED,
    PolicyModule,
    can_share_prompts,
    layer_types,
    whole_shape,
)
from gxpo_trainer.learner.models import fp32_modules, load_config, load_policy
from gxpo_trainer.learner.sequence_parallel import NAME as ULYSSES, SequenceParallel
from gxpo_trainer.learner.shards import partitions, silence_memory_reports, skip_compiled_ops
from gxpo_trainer.planner.architectures import FUSED_KERNELS
from gxpo_trainer.weights.transports import open_store

Device = Literal["cpu", "gpu"]
GROUP_TIMEOUT = timedelta(minutes=30)


def join_process_group(*, rank: int, world_size: int, master_address: str, master_port: int, device: Device) -> None:
    """Join the ranks of one learner: gloo on CPUs, NCCL on GPUs. Does nothing when the process has joined already.

    Raises ConfigError without a GPU to use.
    """
    if device == "gpu" and not torch.cuda.is_available():
        raise ConfigError(
            f"torch {torch.__version__} sees no GPU on {socket.gethostname()}; `make gpu-check` there says why, or set "
            'placement.device = "cpu"',
            reason="no_resources",
        )
    # Read by DeepSpeed at its import and at initialize; a launcher would set them.
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if device == "cpu" else "cuda")
    local_rank = 0 if device == "cpu" else rank % torch.cuda.device_count()
    os.environ["LOCAL_RANK"] = str(local_rank)
    if device == "gpu":
        torch.cuda.set_device(local_rank)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo" if device == "cpu" else "nccl",
            store=open_store(master_address, master_port, rank, world_size, GROUP_TIMEOUT),
            rank=rank,
            world_size=world_size,
            timeout=GROUP_TIMEOUT,
        )
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.WARNING)
    # A warning about every optimizer that is not DeepSpeed's own: torch's are the ones tested here.
    deepspeed.utils.logger.addFilter(lambda record: "untested optimizer" not in record.getMessage())
    warnings.filterwarnings("ignore", message="`torch.distributed.*is deprecated", category=FutureWarning)
    if device == "cpu":
        skip_compiled_ops()
    deepspeed.init_distributed("gloo" if device == "cpu" else "nccl", auto_mpi_discovery=False, verbose=False)


def load_partitioned(
    config: RunConfig,
    attention: str,
    device: Device,
    where: torch.device,
    parallel: SequenceParallel | None = None,
) -> Any:
    """The policy of `model`, partitioned at stage 3; under LoRA with the adapter. Collective; raises as load_policy.

    device: where it computes. where: its weights are loaded there, but at stage 3. parallel: of ranks that share
    columns, with that attention.
    """
    settings, kernels = config.learner, choose_kernels(config, device)
    name = attention if parallel is None else ULYSSES
    chosen = config.model.model_copy(update={"attention": name, "kernels": kernels})
    with _partitioning(config):
        there = where if where.type == "cuda" and settings.zero_stage < 3 else None
        model = load_policy(chosen, precision=settings.precision, lora=settings.lora, device=there)
    if parallel is not None:
        parallel.adapt(model)
    return model


@contextlib.contextmanager
def _partitioning(config: RunConfig) -> Iterator[None]:
    """At stage 3 every layer is partitioned as it is built."""
    settings = config.learner
    if settings.zero_stage < 3:
        yield
        return
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    # While this exists transformers builds models under `deepspeed.zero.Init`; it keeps a weak reference only.
    partitioning = HfDeepSpeedConfig(  # type: ignore[no-untyped-call]
        {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": settings.precision == "bf16"},
            # Frequencies of rotary embeddings too, which `deepspeed.zero.Init` would round: far positions would then be
            # off by whole tokens.
            "data_types": {"keep_in_fp32_modules": ["inv_freq", *fp32_modules(config.model)]},
            "zero_optimization": {"stage": 3},
        }
    )
    try:
        yield
    finally:
        del partitioning
        unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]


def open_engine(
    model: nn.Module, config: RunConfig, device: Device, parallel: SequenceParallel | None
) -> tuple[Any, torch.optim.Optimizer]:
    """The DeepSpeed engine of a loaded policy, and the base optimizer. Collective."""
    policy = PolicyModule(model, parallel)
    trainable = [p for p in policy.parameters() if p.requires_grad]
    settings = config.learner.optimizer
    # Fused: one pass over θ, m, v, g without temporaries, on CPUs too.
    common: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay, "fused": True}
    optimizer: torch.optim.Optimizer
    if settings.name == "adamw":
        optimizer = torch.optim.AdamW(trainable, betas=settings.betas, eps=settings.epsilon, **common)
    else:
        optimizer = torch.optim.SGD(trainable, momentum=settings.momentum, **common)
    return _initialize(policy, optimizer, config, trainable, device), optimizer


def _initialize(
    policy: PolicyModule,
    optimizer: torch.optim.Optimizer | None,
    config: RunConfig,
    parameters: list[nn.Parameter],
    device: Device,
) -> Any:  # deepspeed.DeepSpeedEngine, which has no types
    """`deepspeed.initialize`; what it prints goes to the debug log. The learner clips and accumulates by itself."""
    import deepspeed

    num_weights = sum(whole_shape(parameter).numel() for parameter in parameters)
    bucket = min(max(num_weights, 1024), GRADIENT_BUCKET)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": config.learner.precision == "bf16"},
        # Sums over micro-batches and ranks in fp32: in bf16 their rounding errors would exceed the differences between
        # two gradients.
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": {
            "stage": config.learner.zero_stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": 2 * ((bucket + 1) // 2),
            "overlap_comm": device == "gpu",
            "stage3_prefetch_bucket_size": bucket,
            # Norms and biases stay whole on every rank; matrices are gathered when a layer needs them.
            "stage3_param_persistence_threshold": min(10_000, num_weights // 100),
        },
    }
    silence_memory_reports()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        engine, *_ = deepspeed.initialize(model=policy, optimizer=optimizer, config=settings)
    logging.getLogger(__name__).debug("%s", printed.getvalue())
    return engine


class Reference:
    """The model of `config.of_reference` without gradients: teacher, or start policy of a KL term. Collective.

    At stage 3 each rank holds a part, and DeepSpeed gathers layer by layer. Else it is whole on the host, pages of its
    files as far as their dtype allows, which the ranks of a node share; they are copied to a GPU for a pass.
    """

    def __init__(
        self,
        config: RunConfig,
        attention: str,
        device: Device,
        where: torch.device,
        parallel: SequenceParallel | None = None,
    ) -> None:
        partitioned = config.learner.zero_stage == 3
        where_loaded = where if partitioned else torch.device("cpu")
        with teacher_errors() if config.teacher else contextlib.nullcontext():
            model = load_partitioned(config, attention, device, where_loaded, parallel)
        policy = PolicyModule(model.requires_grad_(False), parallel)
        parameters = list(policy.parameters())
        self._engine = _initialize(policy, None, config, parameters, device) if partitioned else None
        self._policy, self._device = policy if self._engine is None else self._engine, where
        self._hosted = [] if partitioned else [*parameters, *policy.buffers()]

    @torch.no_grad()
    def logprobs(self, counted: Iterable[MicroBatch], dummy: Iterable[MicroBatch], temperature: float) -> list[Tensor]:
        """log π_ref of each micro-batch of `counted`. Collective: every rank passes as many micro-batches in all."""
        hosted = [tensor.data for tensor in self._hosted]
        try:
            for tensor, host in zip(self._hosted, hosted, strict=True):
                tensor.data = host.to(self._device)
            logprobs = [self._policy(micro, temperature, False).logprobs for micro in counted]
            for micro in dummy if self._engine is not None else ():
                self._policy(micro, temperature, False)
            return logprobs
        finally:
            for tensor, host in zip(self._hosted, hosted, strict=True):
                tensor.data = host

    def resident(self) -> list[Tensor]:
        """What stays on the learner's device at stage 3: the partitions, and small parameters that are whole."""
        if self._engine is None:
            return []
        parameters = list(self._engine.module.parameters())
        return [*parameters, *partitions(parameters), *self._engine.module.buffers()]

    def close(self) -> None:
        if self._engine is not None:
            self._engine.destroy()


MAX_DENSE_WIDTH = 4096
"""Widest packed row for which a CPU builds a dense mask."""


def installed_kernels(device: Device) -> frozenset[str]:
    """Attention for rows of several sequences that this process can run, in half precision."""
    if device == "cpu":
        return frozenset()
    from transformers.utils.import_utils import is_flash_attn_2_available

    # torch's own kernel needs Ampere.
    varlen = torch.cuda.get_device_capability() >= (8, 0) and torch.backends.cuda.is_flash_attention_available()
    usable = {"flash_attention_2": is_flash_attn_2_available(), NAME: varlen}
    return frozenset(name for name, works in usable.items() if works)


def check_attention(config: RunConfig, device: Device) -> None:
    """Raise ConfigError for settings that no kernel makes possible; the learner chooses from those that it has."""
    layers = layer_types(load_config(config.model))
    attention = choose_attention(config, device, frozenset(VARIABLE_LENGTH), layers)
    choose_layout(config, device, attention, layers)
    choose_kernels(config, device)


def choose_attention(config: RunConfig, device: Device, kernels: frozenset[str], layers: frozenset[str]) -> str:
    """transformers' name of the attention. kernels: that are installed. layers: see `logprobs.layer_types`.

    `auto` is flash_attention_2 or else varlen where they can run; it is sdpa otherwise, and with shared prompts, whose
    mask the others do not take. Raises ConfigError for a kernel that cannot run, and for packed rows that would need a
    dense mask.
    """
    chosen: str = config.model.attention
    half = device == "gpu" and config.learner.precision == "bf16"
    usable = {
        "flash_attention_2": half and "flash_attention_2" in kernels,
        NAME: half and NAME in kernels and layers <= WINDOWED,
    }
    if chosen == "auto" and config.learner.packing == "shared":
        chosen = "sdpa"
    elif chosen == "auto":
        chosen = next((name for name in ("flash_attention_2", NAME) if usable[name]), "sdpa")
    elif not usable.get(chosen, True):
        needs = "the package flash-attn"
        if chosen == NAME:
            needs = "compute capability 8.0 or newer, and a model whose layers all have full or windowed attention"
        raise ConfigError(
            f'model.attention = "{chosen}" needs a GPU, learner.precision = "bf16", {needs}; '
            'set model.attention = "auto"'
        )
    width = config.learner.micro_batch_tokens
    dense = config.learner.packing == "packed" and chosen not in VARIABLE_LENGTH
    if dense and (device == "gpu" or width > MAX_DENSE_WIDTH):
        fix = (
            'set model.attention = "auto" and learner.precision = "bf16"'
            if device == "gpu"
            else f"set learner.token_budget to at most {MAX_DENSE_WIDTH}"
        )
        raise ConfigError(
            f'learner.packing = "packed" with {chosen} attention builds a dense mask of {width} × {width} tokens for '
            f'each micro-batch; {fix}, or set learner.packing = "padded" or "auto"'
        )
    return chosen


def choose_kernels(config: RunConfig, device: Device) -> Literal["eager", "liger"]:
    """What `model.kernels = "auto"` means. Raises ConfigError for kernels that do not exist for the model or device."""
    family = str(getattr(load_config(config.model), "model_type", ""))
    exist = device == "gpu" and family in FUSED_KERNELS and find_spec("liger_kernel") is not None
    if config.model.kernels == "auto":
        return "liger" if exist and config.learner.precision == "bf16" else "eager"
    if config.model.kernels == "liger" and not exist:
        raise ConfigError(
            'model.kernels = "liger" needs a GPU, the package liger-kernel of the GPU list, and one of '
            f'{", ".join(sorted(FUSED_KERNELS))}; this is {family} on a {device.upper()}; set it to "auto"'
        )
    return config.model.kernels


def choose_layout(config: RunConfig, device: Device, attention: str, layers: frozenset[str]) -> Layout:
    """What `learner.packing = "auto"` means: on a GPU packed rows where the attention takes their boundaries, else
    padded ones; on a CPU shared prompts, since a dense mask over short rows is cheap there.

    Raises ConfigError for packed rows and for shared prompts where the layers would mix the sequences of a row.
    """
    packing = config.learner.packing
    if packing == "auto":
        if device == "gpu":
            return "packed" if attention in VARIABLE_LENGTH and layers <= WINDOWED else "padded"
        return "shared" if can_share_prompts(attention, layers) else "padded"
    if packing == "packed" and not layers <= WINDOWED:
        raise ConfigError(
            f'learner.packing = "packed" but the model has {min(layers - WINDOWED)} layers, which would mix the '
            'sequences of a row; set learner.packing = "padded" or "auto"'
        )
    if packing == "shared" and not can_share_prompts(attention, layers):
        others = sorted(layers - {"full_attention"})
        problem = f"the model has {others[0]} layers" if others else f'model.attention = "{attention}"'
        raise ConfigError(
            f'learner.packing = "shared" needs full attention by sdpa or eager, but {problem}; '
            'set learner.packing = "auto"'
        )
    return packing
