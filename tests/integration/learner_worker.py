"""One learner rank in a process of its own: `python learner_worker.py JOB.json RANK`.

The job names the model folder, the world size and the port; every case in it is run on a learner of its own, and
what rank 0 returns is written to `<out>/<case>.pt`. Ranks assert what they see alone; the parent process compares with
plain torch.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import sys
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from gxpo_trainer.algo.batch import ScoredSequence, StepBatch, shard, with_scale
from gxpo_trainer.algo.packing import pack
from gxpo_trainer.config import LossSettings, ModelConfig, RunConfig
from gxpo_trainer.errors import ConfigError, Diverged
from gxpo_trainer.learner.checkpoint import adapter_weights, full_weights
from gxpo_trainer.learner.deepspeed_learner import DeepSpeedLearner
from gxpo_trainer.learner.logprobs import PolicyModule, can_share_prompts, layer_types
from gxpo_trainer.learner.models import load_policy
from gxpo_trainer.learner.rank import LearnerRank
from gxpo_trainer.learner.sequence_parallel import NAME as ULYSSES, SequenceParallel
from gxpo_trainer.learner.setup import join_process_group, load_partitioned
from gxpo_trainer.planner.architectures import WITH_EXPERTS
from gxpo_trainer.rules.contract import make_rule

TOKEN_LIMIT = 16
VOCABULARY = 97


WITHOUT_GRADIENT = (0, 2, 5)
"""Sequences whose advantage `make_batch(without_gradient=True)` sets to 0."""


def make_batch(*, without_gradient: bool = False) -> StepBatch:
    """Seven sequences of uneven length, one out of the loss; the sampler's log-probabilities are a little off."""
    rng = np.random.default_rng(5)
    sequences = []
    for index in range(7):
        prompt = rng.integers(1, VOCABULARY, size=int(rng.integers(2, 7))).astype(np.int32)
        response = rng.integers(1, VOCABULARY, size=int(rng.integers(1, 11))).astype(np.int32)
        sampler = rng.normal(-4.5, 0.05, size=len(response)).astype(np.float32)
        advantage = float(rng.normal())
        advantage = 0.0 if without_gradient and index in WITHOUT_GRADIENT else advantage
        sequences.append(ScoredSequence(prompt, response, advantage, sampler, in_loss=index != 3))
    return with_scale(sequences, TOKEN_LIMIT)


def make_config(folder: str, **learner: Any) -> RunConfig:
    """A run on the tiny model; `learner` overrides settings of that part, `teacher` names a model to distil."""
    epsilon = learner.pop("epsilon", 1e-6)
    optimizer = {"learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5, "epsilon": epsilon}
    body = {"token_budget": 24, "loss": {"kl_beta": 0.05}, "optimizer": optimizer, **learner}
    model = {"path": folder, "max_length": 64, "gradient_checkpointing": bool(body.pop("checkpointing", False))}
    rollout = {"max_new_tokens": TOKEN_LIMIT, "temperature": 0.8, "async_depth": body.pop("async_depth", 0)}
    config = {"model": model, "rollout": rollout, "learner": body, "seed": 3}
    config["placement"] = {"learner_ranks": body.get("sequence_parallel", 1)}
    if teacher := body.pop("teacher", None):
        config |= {"teacher": {"path": str(Path(folder) / teacher)}, "rollout": {**rollout, "source": "teacher"}}
    return RunConfig.model_validate(config)


class Rank:
    """What the cases share: the job, this rank, and new learners on request."""

    def __init__(self, job: dict[str, Any], rank: int) -> None:
        self.job, self.rank, self.world_size = job, rank, int(job["world_size"])
        self.case = ""
        self.at_close = ExitStack()

    def learner(self, **settings: Any) -> Any:
        """A new learner with the batch; `main` closes it after the case."""
        config = make_config(settings.pop("folder", self.job["model"]), **settings)
        self.share = self.share_of(make_batch(), config.learner.sequence_parallel)
        learner = DeepSpeedLearner(config, rank=self.rank, world_size=self.world_size, master_port=self.job["port"])
        self.at_close.callback(learner.close)
        learner.load_batches([self.share])
        return learner

    def share_of(self, batch: StepBatch, parallel: int = 1) -> StepBatch:
        """This rank's share, which `parallel` consecutive ranks have."""
        return shard(batch, self.world_size // parallel)[self.rank // parallel]

    def saved(self, learner: Any, name: str) -> Path:
        """The folder into which all ranks have saved their state."""
        folder = Path(self.job["out"]) / "saved" / name
        folder.mkdir(parents=True, exist_ok=True)
        learner.save(folder)
        torch.distributed.barrier()
        return folder


def weights(learner: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in full_weights(learner.model)}


def copies(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def take_steps(learner: Any) -> dict[str, Any]:
    """Two GRPO steps on one batch; the second has ρ ≠ 1 and moments."""
    out: dict[str, Any] = {"weights": [weights(learner)], "losses": [], "norms": [], "statistics": [], "clipped": []}
    for _ in range(2):
        result = learner.backward()
        gradients = copies(learner.gradients())
        square = torch.stack([g.double().square().sum() for g in gradients]).sum()[None]
        learner.optimizer_step()
        assert equal(gradients, learner.gradients()), "readable after the step"
        out["weights"].append(weights(learner))
        out["losses"].append(result.loss)
        out["norms"].append(result.grad_norm)
        out["statistics"].append(dict(result.statistics))
        out["clipped"].append(math.sqrt(float(learner.all_reduce(square)[0])))
    out["gap"] = learner.logprob_gap()
    return out


def two_steps(run: Rank, **settings: Any) -> dict[str, Any]:
    learner = run.learner(**settings)
    widths: list[int] = []
    embeddings = learner.model.get_input_embeddings()
    embeddings.register_forward_pre_hook(lambda _, inputs: widths.append(inputs[0].shape[1]))
    out = take_steps(learner)
    out["widest"] = max(widths)
    shapes = [p.shape for p in learner.parameters()]
    assert all(len(shape) == 1 for shape in shapes)
    for aligned in (learner.gradients(), *learner.optimizer_state().moments().values()):
        assert [tensor.shape for tensor in aligned] == shapes
    assert {p.dtype for p in [*learner.parameters(), *learner.gradients()]} == {torch.float32}
    sizes = torch.tensor([float(sum(p.numel() for p in learner.parameters()))], dtype=torch.float64)
    out["num_parameters"] = int(learner.all_reduce(sizes)[0])
    out["optimizer_step"] = learner.optimizer_state().step
    out["adapter"] = {name: tensor.clone() for name, tensor in adapter_weights(learner.model)}
    return out


def overlapped(run: Rank, **settings: Any) -> dict[str, Any]:
    """`two_steps` while DeepSpeed reduces gradients during the backward pass, as it does on GPUs."""
    import deepspeed

    plain = deepspeed.initialize

    def initialize(*, config: dict[str, Any], **others: Any) -> Any:
        config["zero_optimization"]["overlap_comm"] = True
        engine, *rest = plain(config=config, **others)
        assert engine.zero_overlap_comm()
        return engine, *rest

    deepspeed.initialize = initialize
    run.at_close.callback(setattr, deepspeed, "initialize", plain)
    return two_steps(run, **settings)


def written_parameters(run: Rank, **settings: Any) -> dict[str, Any]:
    """Scale all masters by 1.5 in place, publish, and look at the forward pass and at the gathered weights."""
    learner = run.learner(**settings)
    before = weights(learner)
    for parameter in learner.parameters():
        parameter.mul_(1.5)
    learner.publish()
    learner.load_batches([run.share])
    result = learner.backward()
    return {"before": before, "after": weights(learner), "gap": learner.logprob_gap(), "norm": result.grad_norm}


def parked(run: Rank, **settings: Any) -> None:
    """A learner whose memory is offloaded in the middle of a canary and restored continues like one that was not."""
    learner = run.learner(**settings)
    rank = LearnerRank(learner.config, run.rank, run.world_size)
    rank.learner, rank.rule = learner, make_rule(learner.config.learner.rule)

    def next_step() -> tuple[list[Tensor], dict[str, Tensor]]:
        learner.load_batches([run.share])
        rank.rule.step(learner)
        return copies(learner.parameters()), weights(learner)

    next_step()
    folder = run.saved(learner, "parked")
    stayed = next_step()
    learner.load(folder)
    rank.perturb(1e-3, 5)
    # At stage 3 a parameter itself is empty; this rank's slice of it, trainable or frozen, is its `ds_tensor`.
    slices = [p.ds_tensor for p in learner.model.parameters() if hasattr(p, "ds_tensor")]
    tensors = [*learner._shards.persistent(), *learner.model.parameters(), *slices]
    storages = [tensor.untyped_storage() for tensor in tensors]
    moments = sum(t.nbytes for values in learner.optimizer_state().moments().values() for t in values)
    buffers = rank.rule.buffers.count()
    released = rank.park()
    # Weights mapped from a file stay: on a CPU at stage 0 the masters are such weights.
    held = sum(storage.nbytes() for storage in storages if storage.resizable())
    held += rank.rule.buffers.count()
    again = learner.park()
    rank.unpark()
    rank.restore()
    returned = next_step()
    assert buffers == 4
    assert released >= moments
    assert held == again == 0
    assert equal(stayed[0], returned[0])
    assert equal(list(stayed[1].values()), list(returned[1].values()))


def checkpoint(run: Rank, **settings: Any) -> None:
    """A new learner that loads the state continues bit for bit."""

    def next_step(learner: Any) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        noise = torch.rand(3)
        learner.load_batches([run.share])
        learner.backward()
        learner.optimizer_step()
        return noise, copies(learner.parameters()), weights(learner)

    learner = run.learner(**settings)
    learner.set_learning_rate(7e-4)
    learner.backward()
    learner.optimizer_step()
    folder = run.saved(learner, "checkpoint")
    noise, masters, forward = next_step(learner)
    run.at_close.close()
    other = run.learner(**settings)
    assert other.load(folder) is None, "nothing was resharded"
    same_noise, same_masters, same_forward = next_step(other)
    assert torch.equal(noise, same_noise)
    assert equal(same_masters, masters)
    assert equal(list(same_forward.values()), list(forward.values()))
    assert (other.learning_rate, other.optimizer_state().step) == (7e-4, 2)


def next_rule_step(run: Rank, learner: Any, rule: Any, *, supervised: bool = False) -> dict[str, Any]:
    learner.load_batches([replace(run.share, supervised=supervised)])
    before = weights(learner)
    report = rule.step(learner)
    return {
        "before": before,
        "after": weights(learner),
        "rule": rule.state_dict(),
        "passes": report.backward_passes,
        "metrics": dict(report.metrics),
    }


def save_state(run: Rank, *, rule: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Two steps of a rule, a checkpoint, and the step after it."""
    learner = run.learner(rule=rule, **settings)
    learner.set_learning_rate(7e-4)
    made = make_rule(learner.config.learner.rule)
    for _ in range(2):
        learner.load_batches([run.share])
        made.step(learner)
    folder = run.saved(learner, run.case)
    if run.rank == 0:
        (folder / "rule.json").write_text(json.dumps(made.state_dict()))
    return {"step": learner.optimizer_state().step, **next_rule_step(run, learner, made)}


def load_state(run: Rank, *, folder: str, rule: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """The step after a checkpoint that another number of ranks, or another stage, wrote."""
    learner = run.learner(rule=rule, **settings)
    made = make_rule(learner.config.learner.rule)
    resharded = learner.load(Path(folder))
    made.load_state_dict(json.loads((Path(folder) / "rule.json").read_text()))
    return {
        "resharded": resharded,
        "step": learner.optimizer_state().step,
        "learning_rate": learner.learning_rate,
        **next_rule_step(run, learner, made),
    }


def loaded(run: Rank, **settings: Any) -> None:
    """A learner's weights and buffers against those of the model loaded whole, and a model that lacks a weight."""
    learner = run.learner(**settings)
    config = learner.config
    torch.manual_seed(config.seed)
    plain = load_policy(config.model, precision=config.learner.precision, lora=config.learner.lora)
    expected = dict(full_weights(plain)) | dict(plain.named_buffers())
    actual = weights(learner) | dict(learner.model.named_buffers())
    adapter = {name: tensor.clone() for name, tensor in adapter_weights(learner.model)}
    for name, parameter in plain.named_parameters():
        if ".lora_" in name:
            expected[name], actual[name] = parameter, adapter[name.replace(".default.", ".")]
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == actual[name].dtype, name
        assert torch.equal(tensor, actual[name]), name
    with pytest.raises(ConfigError) as refused:
        run.learner(folder=run.job["incomplete"], **settings)
    assert run.rank or "lacks the weight" in str(refused.value)


def rule_step(run: Rank, *, rule: dict[str, Any], supervised: bool = False, **settings: Any) -> dict[str, Any]:
    """One step of a rule after one plain step; supervised: on responses to imitate."""
    learner = run.learner(rule=rule, **settings)
    learner.backward()
    learner.optimizer_step()
    return next_rule_step(run, learner, make_rule(learner.config.learner.rule), supervised=supervised)


def mini_batches(run: Rank, **settings: Any) -> dict[str, Any]:
    """Two mini-batches that are the same batch: the second one's log π_old are those of before the first's step."""
    learner = run.learner(**settings)
    learner.load_batches([run.share, run.share])
    first = learner.backward()
    learner.optimizer_step()
    learner.use_batch(1)
    second = learner.backward()
    return {
        "ratios": [first.statistics["ratio_mean"], second.statistics["ratio_mean"]],
        "kl": [first.statistics["kl"], second.statistics["kl"]],
        "gap": learner.logprob_gap(),
    }


def no_grad(run: Rank, **settings: Any) -> dict[str, Any]:
    """Two steps on a batch in which some advantages are 0: what a pass backpropagates, and what it counts."""
    learner = run.learner(loss={"kl_beta": 0.0}, **settings)
    parallel = learner.config.learner.sequence_parallel
    learner.load_batches([run.share_of(make_batch(without_gradient=True), parallel)])
    loaded = learner._batches[0]
    moved = {float(a) for micro in loaded.grad for a in micro.advantages}
    out = take_steps(learner)
    tokens = sum(micro.target_ids.numel() for micro in loaded.no_grad)
    # A dummy micro-batch, on a rank without sequences that have a gradient, has the advantage 0 too.
    assert len(moved) == 1 or 0.0 not in moved
    out["no_grad_tokens"] = int(learner.all_reduce(torch.tensor([float(tokens)], dtype=torch.float64))[0])
    if learner._shards.replicated:
        out["no_grad_tokens"] *= run.world_size
    return out


class LikelihoodSettings(LossSettings):
    implementation: ClassVar[str] = "learner_worker:Likelihood"

    surrogate: Literal["likelihood"] = "likelihood"


class Likelihood:
    """−log π of each token, whatever its advantage."""

    def __init__(self, settings: LikelihoodSettings) -> None:
        self.settings = settings

    def __call__(self, log_ratio: Tensor, logprobs: Tensor, micro: Any) -> tuple[Tensor, Tensor]:
        return log_ratio.exp(), -logprobs


def own_loss(run: Rank, **settings: Any) -> dict[str, Any]:
    """The norm of a loss that knows no advantages, without advantages of 0 and with some."""
    learner = run.learner(loss={"surrogate": "learner_worker:LikelihoodSettings"}, **settings)
    norms = [learner.backward().grad_norm]
    learner.load_batches([run.share_of(make_batch(without_gradient=True))])
    return {"norms": [*norms, learner.backward().grad_norm]}


def not_finite(run: Rank, **settings: Any) -> None:
    """A NaN on one rank is a NaN norm on all; the optimizer refuses it; the next pass is clean."""
    learner = run.learner(**settings)
    before = copies(learner.parameters())
    clean = learner.backward()
    if run.rank == 0:
        learner._batches[0].grad[0].advantages[0] = math.nan
    result = learner.backward()
    with pytest.raises(Diverged):
        learner.optimizer_step()
    assert equal(before, learner.parameters())
    learner.load_batches([run.share])
    again = learner.backward()
    assert [clean.finite, result.finite, again.finite] == [True, False, True]
    assert again.grad_norm == pytest.approx(clean.grad_norm, rel=1e-6)


def family_columns(run: Rank, *, folders: dict[str, str]) -> None:
    """Each family's log-probabilities, and the gradient of a weighted sum of them, in float64 and with columns that the
    ranks share as without; windows are shorter than the sequences."""
    join_process_group(rank=run.rank, world_size=run.world_size, master_address="127.0.0.1",
                       master_port=run.job["port"], device="cpu")  # fmt: skip
    parallel = SequenceParallel(run.world_size, "sdpa")
    for family, folder in folders.items():
        policies = []
        for attention in ("sdpa", ULYSSES):
            config = ModelConfig(path=folder).model_copy(update={"attention": attention})
            model: Any = load_policy(config, precision="fp32").double()
            if family == WITH_EXPERTS:
                model.set_experts_implementation("eager")  # the default's matrix product has no float64
            if attention == ULYSSES:
                parallel.adapt(model)
            policies.append(PolicyModule(model, parallel if attention == ULYSSES else None))
        layouts = (
            ("padded", "packed", "shared") if can_share_prompts("sdpa", layer_types(model.config)) else ("packed",)
        )
        for layout in layouts:
            packed = pack(make_batch(), token_budget=70, layout=layout, aggregation="token_mean", pad_id=0,
                          multiple=run.world_size)  # fmt: skip
            for micro in packed:
                plain, shared = (policy(micro, 0.8, True) for policy in policies)
                torch.testing.assert_close(shared.logprobs, plain.logprobs, rtol=1e-10, atol=1e-10)
                torch.testing.assert_close(shared.entropy, plain.entropy, rtol=1e-10, atol=1e-10)
                for outputs in (plain, shared):
                    (outputs.logprobs * torch.sin(micro.target_ids + 1.0)).sum().backward()
        for (name, left), right in zip(policies[0].named_parameters(), policies[1].parameters(), strict=True):
            assert left.grad is not None, name
            gradient = torch.zeros_like(left) if right.grad is None else right.grad
            torch.distributed.all_reduce(gradient)
            # Norms compute in fp32, whatever the precision of the rest.
            assert (gradient - left.grad).norm() <= 1e-6 * left.grad.norm(), f"{family}: {name}"


def alive() -> dict[int, Tensor]:
    """Every tensor that Python can reach, and its gradient, by storage."""
    tensors: dict[int, Tensor] = {}
    for item in gc.get_objects():
        if type(item) in (Tensor, torch.nn.Parameter):
            for tensor in (item, item.grad if item.is_leaf else None):
                if tensor is not None:
                    tensors[tensor.untyped_storage().data_ptr()] = tensor
    return tensors


def held_bytes(run: Rank, **settings: Any) -> dict[str, Any]:
    """Bytes of all distinct storages that are alive after a step of the rule."""
    gc.collect()
    before = set(alive())
    learner = run.learner(**settings)
    rule = make_rule(learner.config.learner.rule)  # whose buffers live as long as it does
    rule.step(learner)
    gc.collect()
    return {"bytes": sum(t.untyped_storage().nbytes() for key, t in alive().items() if key not in before)}


def private_bytes() -> int:
    """Resident bytes of this process that no file backs."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def settled_bytes() -> int:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return private_bytes()


def bytes_of_loading(path: str, zero_stage: int) -> dict[str, int]:
    """Private bytes above those before: `peak` while the policy is loaded, `held` then."""
    config = RunConfig.model_validate({"model": {"path": path}, "learner": {"zero_stage": zero_stage}})
    before, done, most = settled_bytes(), threading.Event(), [0]

    def sample() -> None:
        while not done.wait(0.0005):
            most.append(max(most.pop(), private_bytes()))

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    model = load_partitioned(config, "sdpa", "cpu", torch.device("cpu"))
    done.set()
    sampler.join()
    peak = max(*most, private_bytes()) - before
    held = settled_bytes() - before
    del model
    return {"peak": peak, "held": held}


def load_memory(run: Rank, *, folder: str, zero_stage: int) -> dict[str, Any]:
    """What loading a policy takes on each rank."""
    address = {"master_address": "127.0.0.1", "master_port": run.job["port"]}
    join_process_group(rank=run.rank, world_size=run.world_size, device="cpu", **address)
    bytes_of_loading("starter", zero_stage)  # the first model of each kind brings imports along
    measured: list[Any] = [None] * run.world_size
    torch.distributed.all_gather_object(measured, bytes_of_loading(folder, zero_stage))
    return {"ranks": measured}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    gc.freeze()  # each learner is collected at its end: not all of torch with it
    run = Rank(job, int(sys.argv[2]))
    for name, (function, settings) in job["cases"].items():
        run.case = name
        with run.at_close:
            result = globals()[function](run, **settings)
        if run.rank == 0:
            torch.save(result, Path(job["out"]) / f"{name}.pt")


if __name__ == "__main__":
    main()
