"""One rank of the DeepSpeed learner: the operations that an update rule uses, on the shards of a model."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from gxpo_trainer.algo.batch import StepBatch
from gxpo_trainer.algo.losses import (
    MAXIMA,
    TokenOutputs,
    combine_statistics,
    distillation_advantages,
    finish_statistics,
    policy_loss,
    supervised_loss,
)
from gxpo_trainer.algo.packing import MicroBatch, dummy_micro_batch, pack
from gxpo_trainer.config import RunConfig
from gxpo_trainer.errors import Diverged
from gxpo_trainer.learner import checkpoint, setup
from gxpo_trainer.learner.logprobs import layer_types
from gxpo_trainer.learner.models import load_config
from gxpo_trainer.learner.sequence_parallel import SequenceParallel
from gxpo_trainer.learner.shards import Parking, open_shards
from gxpo_trainer.rules.contract import AdamWRecurrence, BackwardResult, OptimizerState, SGDRecurrence, norm
from gxpo_trainer.types import Metrics

Statistics = dict[str, Tensor]
"""float64 scalars of algo.losses.policy_loss."""


@dataclass
class LoadedBatch:
    """Micro-batches on the device, in the order in which every pass runs them.

    no_grad: those whose gradient is zero whatever the parameters, run forward only, for the statistics. dummy,
    dummy_no_grad: micro-batches without weight, with which all ranks make the same number of passes of both kinds: ZeRO
    stages 2 and 3 communicate in each. old, reference: log π_old and log π_ref (of the teacher where there is one), one
    float32[T] per micro-batch of `counted`; None until known. first_pass, entropy: statistics of the first pass over
    the batch, and its entropy, of all ranks together. supervised: see StepBatch.
    """

    grad: list[MicroBatch]
    dummy: list[MicroBatch]
    no_grad: list[MicroBatch]
    dummy_no_grad: list[MicroBatch]
    old: list[Tensor] | None = None
    reference: list[Tensor] | None = None
    first_pass: Statistics | None = None
    entropy: Tensor | None = None
    supervised: bool = False

    @property
    def num_passes(self) -> int:
        """Forward and backward passes a rank makes over the batch."""
        return len(self.grad) + len(self.dummy)

    @property
    def counted(self) -> list[MicroBatch]:
        """Micro-batches whose tokens are in the loss."""
        return [*self.grad, *self.no_grad]


def sum_over_ranks(values: Tensor, device: torch.device) -> Tensor:
    """Sum of a small float64 vector over all ranks."""
    total = values.to(device=device, dtype=torch.float64, copy=True)
    torch.distributed.all_reduce(total)
    return total


def statistics_over_ranks(parts: Sequence[Statistics], device: torch.device, copies: int = 1) -> Statistics:
    """Statistics of this rank's micro-batches combined, then those of all ranks. copies: ranks with the same parts."""
    own = functools.reduce(combine_statistics, parts)
    sums, maxima = sorted(own.keys() - MAXIMA), sorted(own.keys() & MAXIMA)
    total = sum_over_ranks(torch.stack([own[name].double() for name in sums]), device) / copies
    largest = torch.stack([own[name].double() for name in maxima]) if maxima else total[:0]
    if maxima:
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    return dict(zip(sums, total, strict=True)) | dict(zip(maxima, largest, strict=True))


class DeepSpeedLearner:
    """rules.contract.RuleLearner on one rank. All ranks call all methods in the same order (SPMD).

    Order within a step: `load_batches` → [`fix_old_logprobs`] → the rule's operations; with several mini-batches of one
    rollout `use_batch` before those of each.

    The gradient is the plain sum over micro-batches and ranks: every token carries its final weight. It is clipped
    here, by the global norm, so that what a rule reads is what the optimizer consumes.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        rank: int = 0,
        world_size: int = 1,
        master_address: str = "127.0.0.1",
        master_port: int,
        device: setup.Device = "cpu",
    ) -> None:
        """Join the other ranks, load the policy and partition it; raises as load_policy and choose_layout."""
        self.config = config
        self.rank, self.world_size = rank, world_size
        setup.join_process_group(
            rank=rank, world_size=world_size, master_address=master_address, master_port=master_port, device=device
        )
        self.idle_bytes = int(psutil.Process().memory_info().rss)
        """Resident set before the model is loaded; the planner counts from it."""
        self.device = torch.device("cpu" if device == "cpu" else f"cuda:{torch.cuda.current_device()}")
        settings = config.learner
        self._loss = settings.loss.resolved(config.rollout.async_depth)
        torch.manual_seed(config.seed)
        kernels = setup.installed_kernels(device)
        attention = setup.choose_attention(config, device, kernels, layer_types(load_config(config.model)))
        size = settings.sequence_parallel
        parallel = SequenceParallel(size, attention) if size > 1 else None
        # The adapter's initial weights are drawn at the end of loading.
        self.model: Any = setup.load_partitioned(config, attention, device, self.device, parallel)
        """The transformers model, or PEFT's around it."""
        self._engine, optimizer = setup.open_engine(self.model, config, device, parallel)
        self._packing = setup.choose_layout(config, device, attention, layer_types(self.model.config))
        self.attention = f"{attention} over {self._packing} rows, {setup.choose_kernels(config, device)} kernels"
        self._pad_id = _pad_id(self.model.config)
        self._teaches = config.teacher is not None
        self._with_reference = self._teaches or settings.loss.kl_beta > 0
        own = self._teaches or (self._with_reference and settings.lora is None)
        self._reference = None
        if own:
            self._reference = setup.Reference(config.of_reference, attention, device, self.device, parallel)
        self._optimizer = optimizer
        self._shards = open_shards(
            self._engine, optimizer, zero_stage=settings.zero_stage, precision=settings.precision
        )
        self.parking = Parking()
        """Its `unpark` undoes `park` bit for bit; gradients come back as zeros."""
        self._batches: list[LoadedBatch] = []
        self._num_before_update = 0
        """Batches whose first pass is before the step's first update."""
        self._index = 0
        self._finite = False

    def load_batches(self, batches: Sequence[StepBatch]) -> None:
        """Load this rank's shares of the mini-batches that passes run over; the first becomes the present one. Ranks
        that are parallel over sequences have the same share.

        With more than one, log π_old of all of them is taken now, by forward-only passes, because the first one's step
        moves the policy. Stale samples with π_old of the sampler and supervised batches need none.
        """
        self._batches = [self._load_share(batch) for batch in batches]
        stale = self.config.rollout.async_depth > 0
        supervised = any(batch.supervised for batch in batches)
        self._num_before_update = 1
        if len(batches) > 1 and not supervised and not (stale and self._loss.proximal == "sampler"):
            self._num_before_update = len(batches)
            for index in range(len(batches)):
                self.use_batch(index)
                self.fix_old_logprobs()
        self.use_batch(0)

    def _load_share(self, batch: StepBatch) -> LoadedBatch:
        """Pack this rank's share. Collective: the ranks agree on the number of passes.

        Where the loss scales with the advantage and has no KL term, a sequence of advantage 0 (a group of equal
        rewards) has no gradient. Its backward pass, two thirds of the work, is left out.
        """
        settings = self.config.learner
        all_move = self._with_reference or not settings.loss.scales_with_advantage

        def packed(gradient: bool) -> list[MicroBatch]:
            chosen = tuple(
                s if (s.advantage != 0.0 or all_move) == gradient else replace(s, in_loss=False)
                for s in batch.sequences
            )
            if not gradient and not any(s.in_loss for s in chosen):
                return []
            return pack(
                replace(batch, sequences=chosen),
                token_budget=settings.micro_batch_tokens,
                layout=self._packing,
                aggregation=settings.loss.aggregation,
                pad_id=self._pad_id,
                multiple=settings.sequence_parallel,
            )

        parts = [packed(True), packed(False)]
        counts = torch.tensor([len(part) for part in parts], dtype=torch.int64, device=self.device)
        torch.distributed.all_reduce(counts, op=torch.distributed.ReduceOp.MAX)
        dummies = [
            [dummy_micro_batch(self._pad_id, settings.sequence_parallel) for _ in range(int(count) - len(part))]
            for part, count in zip(parts, counts.tolist(), strict=True)
        ]
        grad, no_grad, dummy, dummy_no_grad = ([m.to(self.device) for m in part] for part in (*parts, *dummies))
        return LoadedBatch(grad, dummy, no_grad, dummy_no_grad, supervised=batch.supervised)

    def use_batch(self, index: int) -> None:
        self._index = index

    @torch.no_grad()
    def fix_old_logprobs(self, temperature: float | None = None) -> None:
        """Take log π_old of the present batch now, by a forward-only pass, instead of from its first pass.

        temperature: None for `rollout.temperature`; another one is for measurements only, no step may follow.
        """
        loaded = self._batches[self._index]
        passes = self._forward_all(loaded, temperature)
        loaded.old = [outputs.logprobs for outputs in passes]
        without_kl = self._loss.model_copy(update={"kl_beta": 0.0})
        parts = [policy_loss(*pair, None, None, without_kl)[1] for pair in zip(passes, loaded.counted, strict=True)]
        loaded.first_pass = statistics_over_ranks(parts, self.device, self.config.learner.sequence_parallel)

    def logprob_gap(self) -> tuple[float | None, float | None]:
        """Mean and maximum of |log π_learner − log π_sampler| over the tokens in the loss of all loaded mini-batches,
        or of the first alone where the first pass of the others is after its update; None when there is none."""
        metrics = self._first_pass_metrics(self._batches[: self._num_before_update])
        return metrics.get("logprob_gap_mean"), metrics.get("logprob_gap_max")

    def backward(self) -> BackwardResult:
        loaded = self._batches[self._index]
        if self._with_reference and loaded.reference is None and not loaded.supervised:
            loaded.reference = self._reference_logprobs(loaded)
        self._shards.begin()
        no_grad = [self._pass(loaded, len(loaded.grad) + i, gradient=False) for i in range(len(loaded.no_grad))]
        for micro in loaded.dummy_no_grad:
            with torch.no_grad():
                self._forward(micro, with_entropy=False)
        passes = [self._pass(loaded, index, gradient=True) for index in range(len(loaded.grad))] + no_grad
        for index, micro in enumerate(loaded.dummy, start=len(loaded.grad) + 1):
            nothing = self._forward(micro, with_entropy=False).logprobs.sum() * 0.0
            self._accumulate(nothing, last=index == loaded.num_passes)
        self._shards.collect()
        copies = self.config.learner.sequence_parallel
        statistics = statistics_over_ranks([part for part, _ in passes], self.device, copies)
        if loaded.entropy is None:
            loaded.entropy = statistics["entropy"]
        statistics["entropy"] = loaded.entropy
        if loaded.old is None:
            loaded.old = [logprobs for _, logprobs in passes]
        if loaded.first_pass is None:
            loaded.first_pass = statistics
        metrics = finish_statistics(statistics)
        reported = {name: v for name, v in metrics.items() if not name.startswith(("logprob_gap", "importance"))}
        loss = reported.pop("loss")
        if "cross_entropy" in reported:  # in nats per token, whatever the aggregation of the loss
            reported["loss"] = reported.pop("cross_entropy")
        result = BackwardResult(loss=loss, grad_norm=self._clip(), statistics=reported)
        self._finite = result.finite
        return result

    def optimizer_step(self) -> None:
        """See RuleLearner. Raises Diverged when the gradient is not finite: it would destroy parameters and moments."""
        if not self._finite:
            raise Diverged("the gradient of the last pass is not finite; no optimizer step can be taken on it")
        self._shards.optimizer_step()

    def parameters(self) -> list[Tensor]:
        return self._shards.parameters()

    def gradients(self) -> list[Tensor]:
        return self._shards.gradients()

    def recurrence(self) -> AdamWRecurrence | SGDRecurrence:
        settings = self.config.learner.optimizer
        if settings.name == "adamw":
            beta1, beta2 = settings.betas
            return AdamWRecurrence(self.learning_rate, beta1, beta2, settings.epsilon, settings.weight_decay)
        return SGDRecurrence(self.learning_rate, settings.momentum, settings.weight_decay)

    def publish(self) -> None:
        self._shards.publish()

    def all_reduce(self, scalars: Tensor) -> Tensor:
        """Sum of a small float64 vector over the distinct shards: what every rank holds (stage 0) counts once."""
        total = sum_over_ranks(scalars, self.device)
        return total / self.world_size if self._shards.replicated else total

    def optimizer_state(self) -> OptimizerState:
        return self._shards

    def reset_optimizer(self) -> None:
        """Make the next optimizer step the first one."""
        for moments in self._shards.moments().values():
            for moment in moments:
                moment.zero_()
        self._shards.set_step(0)

    @property
    def learning_rate(self) -> float:
        """η of the next optimizer step."""
        return float(self._optimizer.param_groups[0]["lr"])

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set η. The schedule belongs to the caller: a look-ahead rule takes several steps a training step."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate

    def own_metrics(self) -> Metrics:
        """`importance/…` at the first passes of all loaded mini-batches, where they are measured; `system/learner_…`:
        resident set before the model was loaded, and on a GPU the most that torch reserved."""
        first, prefix = self._first_pass_metrics(self._batches), "importance_"
        metrics = {f"importance/{n.removeprefix(prefix)}": v for n, v in first.items() if n.startswith(prefix)}
        metrics["system/learner_idle_bytes"] = float(self.idle_bytes)
        if self.device.type == "cuda":
            metrics["system/learner_device_peak_bytes"] = float(torch.cuda.max_memory_reserved(self.device))
        return metrics

    @property
    def replicated(self) -> bool:
        """Whether every rank holds all parameters (stage 0)."""
        return self._shards.replicated

    def save(self, folder: Path) -> None:
        """Write this rank's state into `folder`; see learner.checkpoint."""
        checkpoint.write(folder, self.rank, self._shards, self._layout(), self.learning_rate, self.device)

    def load(self, folder: Path) -> str | None:
        """Continue from what the ranks of a learner saved, whatever their number and stage; publishes. Collective.

        Returns what was resharded, None for a state of the same layout, which continues bit for bit. Raises as
        `checkpoint.restore`.
        """
        layout = self._layout()
        saved = checkpoint.restore(folder, self.rank, self._shards, layout, self.device)
        self.set_learning_rate(saved.learning_rate)
        self.publish()
        if saved.layout == layout:
            return None
        return f"parameters and optimizer state of {saved.layout.describe()} loaded on {layout.describe()}"

    def trim(self) -> None:
        """Release the loaded batches, the gradient of the last pass, and what torch keeps reserved on a GPU."""
        self._batches = []
        self._shards.begin()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def park(self) -> int:
        """Move parameters, optimizer state and a partitioned reference to the host, drop gradients; the bytes released.
        Nothing but `parking.unpark` may follow."""
        self._batches = []
        reference = [] if self._reference is None else self._reference.resident()
        kept = [*self.model.parameters(), *self.model.buffers(), *self._shards.persistent(), *reference]
        return self.parking.park(kept, self._shards.gradient_buffers())

    def close(self) -> None:
        """Free the engine. The process group stays, for another learner in the same process."""
        self._batches = []
        if self._reference is not None:
            self._reference.close()
        self._reference = None
        self._engine.destroy()

    def _layout(self) -> checkpoint.Layout:
        settings = self.config.learner
        return checkpoint.Layout(
            world_size=self.world_size,
            zero_stage=settings.zero_stage,
            precision=settings.precision,
            optimizer=settings.optimizer.name,
            lora_rank=settings.lora.rank if settings.lora else 0,
        )

    def _first_pass_metrics(self, batches: Sequence[LoadedBatch]) -> Metrics:
        """Of the first passes over those that had one; there must be one."""
        done = [batch.first_pass for batch in batches if batch.first_pass is not None]
        return finish_statistics(functools.reduce(combine_statistics, done))

    def _forward(self, micro: MicroBatch, *, with_entropy: bool, temperature: float | None = None) -> TokenOutputs:
        chosen = temperature
        if temperature is None:
            chosen = 1.0 if self._batches[self._index].supervised else self.config.rollout.temperature
        outputs: TokenOutputs = self._engine(micro, chosen, with_entropy)
        return outputs

    def _forward_all(self, loaded: LoadedBatch, temperature: float | None = None) -> list[TokenOutputs]:
        """Forward-only passes over the counted micro-batches, and over dummies, as many as the other ranks make."""
        outputs = [self._forward(micro, with_entropy=False, temperature=temperature) for micro in loaded.counted]
        for micro in [*loaded.dummy, *loaded.dummy_no_grad]:
            self._forward(micro, with_entropy=False)
        return outputs

    def _pass(self, loaded: LoadedBatch, index: int, *, gradient: bool) -> tuple[Statistics, Tensor]:
        """One counted micro-batch forward, and back with `gradient`; its statistics and log π_θ."""
        micro = loaded.counted[index]
        old = None if loaded.old is None else loaded.old[index]
        reference = None if loaded.reference is None else loaded.reference[index]
        with torch.set_grad_enabled(gradient):
            # It reads and writes all logits once more: in the first pass alone.
            outputs = self._forward(micro, with_entropy=loaded.entropy is None)
            if loaded.supervised:
                loss, part = supervised_loss(outputs, micro)
            else:
                if self._teaches:
                    assert reference is not None
                    micro = replace(micro, advantages=distillation_advantages(outputs, old, reference))
                loss, part = policy_loss(outputs, micro, old, reference, self._loss)
        if gradient:
            self._accumulate(loss, last=index + 1 == loaded.num_passes)
        return part, outputs.logprobs.detach()

    def _accumulate(self, loss: Tensor, *, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over ranks; the weights in the loss ask for the sum.
        self._engine.backward(loss * self.world_size)

    @torch.no_grad()
    def _reference_logprobs(self, loaded: LoadedBatch) -> list[Tensor]:
        if self._reference is not None:
            dummy = [*loaded.dummy, *loaded.dummy_no_grad]
            return self._reference.logprobs(loaded.counted, dummy, self.config.rollout.temperature)
        with self.model.disable_adapter():
            return [outputs.logprobs for outputs in self._forward_all(loaded)]

    @torch.no_grad()
    def _clip(self) -> float:
        """Global norm before clipping; scales the gradients in place so that their norm is within the limit."""
        gradients = self._shards.gradients()
        total = norm(self, gradients)
        limit = self.config.learner.optimizer.max_grad_norm
        if math.isfinite(total) and total > limit:
            for gradient in gradients:
                gradient.mul_(limit / total)
        return total


def _pad_id(model_config: Any) -> int:
    """Any valid token will do: no token in the loss ever sees the padding."""
    candidates = (model_config.pad_token_id, model_config.eos_token_id)
    return next((c for c in candidates if isinstance(c, int) and 0 <= c < model_config.vocab_size), 0)
