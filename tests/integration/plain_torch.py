"""GRPO, AdamW and GXPO on whole tensors, written out: what the learner's tests compare with."""

from __future__ import annotations

import math
from typing import Any

import torch
from learner_worker import make_batch, make_config
from torch import Tensor

from gxpo_trainer.learner.models import load_policy

LORA = {"rank": 3, "alpha": 6.0}
GXPO = {"name": "gxpo", "k": 4, "alpha": 0.5, "delta": 1e-6}


class PlainTorch:
    """GRPO on whole tensors: one sequence a forward pass, autograd, clipping and AdamW written out."""

    def __init__(
        self,
        folder: str,
        lora: bool = False,
        *,
        without_gradient: bool = False,
        kl_beta: float = 0.05,
        teacher: str | None = None,
    ) -> None:
        self.kl_beta = kl_beta
        self.config = make_config(folder, **({"lora": LORA} if lora else {}))
        torch.manual_seed(self.config.seed)
        self.model = load_policy(self.config.model, precision="fp32", lora=self.config.learner.lora)
        self.names = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.m = {n: torch.zeros_like(p) for n, p in self.names.items()}
        self.v = {n: torch.zeros_like(p) for n, p in self.names.items()}
        self.step = 0
        self.sequences = [s for s in make_batch(without_gradient=without_gradient).sequences if s.in_loss]
        self.old: list[Tensor] | None = None
        self.teaches = teacher is not None
        settings = self.config.model.model_copy(update={"path": f"{folder}/{teacher}"})
        teacher_model = load_policy(settings, precision="fp32") if teacher else self.model
        self.reference = [x.detach() for x in self.logprobs(teacher_model)]

    def logprobs(self, model: Any = None) -> list[Tensor]:
        out = []
        for s in self.sequences:
            prompt, response = torch.tensor(s.prompt_ids).long(), torch.tensor(s.response_ids).long()
            logits = (model or self.model)(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
            out.append((logits / self.config.rollout.temperature).log_softmax(-1).gather(1, response[:, None])[:, 0])
        return out

    def gap(self) -> tuple[float, float]:
        both = zip(self.logprobs(), self.sequences, strict=True)
        gaps = torch.cat([(x.detach() - torch.tensor(s.sampler_logprobs)).abs() for x, s in both])
        return float(gaps.mean()), float(gaps.max())

    def loss(self) -> Tensor:
        logprobs = self.logprobs()
        if self.old is None:
            self.old = [x.detach() for x in logprobs]
        total, count = torch.zeros(()), 0
        for x, old, ref, s in zip(logprobs, self.old, self.reference, self.sequences, strict=True):
            ratio = (x - old).exp()
            advantage = ref - old if self.teaches else s.advantage
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            total = total + (-surrogate + self.kl_beta * ((ref - x).exp() - (ref - x) - 1)).sum()
            count += len(x)
        return total / count

    def weights(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in self.names.items()}

    def gradient(self) -> tuple[float, float, dict[str, Tensor]]:
        loss = self.loss()
        gradients = torch.autograd.grad(loss, list(self.names.values()))
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        factor = min(1.0, 0.5 / norm)
        return float(loss.detach()), norm, {n: g * factor for n, g in zip(self.names, gradients, strict=True)}

    @torch.no_grad()
    def adamw(self, gradients: dict[str, Tensor]) -> None:
        self.step += 1
        for n, p in self.names.items():
            g = gradients[n]
            self.m[n] = 0.9 * self.m[n] + 0.1 * g
            self.v[n] = 0.999 * self.v[n] + 0.001 * g * g
            m_hat, v_hat = self.m[n] / (1 - 0.9**self.step), self.v[n] / (1 - 0.999**self.step)
            p.copy_(p - 1e-3 * 0.1 * p - 1e-3 * m_hat / (v_hat.sqrt() + 1e-6))

    @torch.no_grad()
    def write(self, weights: dict[str, Tensor]) -> None:
        for n, p in self.names.items():
            p.copy_(weights[n])


def reference_steps(plain: PlainTorch) -> dict[str, Any]:
    out: dict[str, Any] = {"gap": plain.gap(), "weights": [plain.weights()], "losses": [], "norms": []}
    for _ in range(2):
        loss, norm, gradients = plain.gradient()
        plain.adamw(gradients)
        out["losses"].append(loss)
        out["norms"].append(norm)
        out["weights"].append(plain.weights())
    return out
