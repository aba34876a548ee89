"""Each rule and predictor on the starter policy against a straight-line numpy version of its definition.

The reference shares nothing with the product but the model: its own loss (a full log-softmax), its own AdamW, its
own extrapolation, written down from docs/algorithms in float64 throughout.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from gxpo_services.local.ray_head import free_port
from gxpo_trainer.algo.batch import ScoredSequence, with_scale
from gxpo_trainer.config import RunConfig
from gxpo_trainer.data.chat import render_messages
from gxpo_trainer.data.word_problems import generate
from gxpo_trainer.learner.deepspeed_learner import DeepSpeedLearner
from gxpo_trainer.learner.models import load_policy, load_tokenizer
from gxpo_trainer.rules.contract import make_rule

pytestmark = pytest.mark.engine
# η = 1e-4: an fp32 weight of size 0.5 is rounded to 3e-8, which at η = 1e-5 is 1e-3 of an AdamW step by itself.
# ε = 1e-4: with 1e-8 the many coordinates whose gradient is near its rounding noise take a full step each, and that
# noise alone is 1e-3 of the norm of the update.
LR, BETA1, BETA2, EPS, DECAY, CLIP, K, ALPHA = 1e-4, 0.9, 0.999, 1e-4, 0.01, 1.0, 5, 0.5
DELTA = 1e-5  # for the same reason: the ratio of two gradients that are rounding noise is noise on both sides
# A displacement is a difference of fp32 weights, rounded to 3e-8 as above. Under a large ε the small gradients' steps
# are smaller than that, and their ratio one of roundings; so here ε is small enough for every step to be near η.
DISPLACEMENT_EPS, DISPLACEMENT_DELTA = 1e-6, 1e-8
# With an odd K the scale has a pole at r = -1, where rounding decides between its two clamps. Rolled-back moments make
# the update smaller, so that one such coordinate is 1e-3 of it on some processors; an even K has no pole.
ROLLBACK_K = 4
GXPO = {"name": "gxpo", "k": K, "alpha": ALPHA, "delta": DELTA, "gate": {"mode": "never"}}
RULES = {
    "grpo": {"name": "grpo"},
    "sfpo": {"name": "sfpo", "k": K, "alpha": ALPHA, "gate": {"mode": "never"}},
    "gradient": GXPO,
    "displacement": {**GXPO, "predictor": "displacement", "delta": DISPLACEMENT_DELTA},
    "replay": {**GXPO, "predictor": "replay"},
    "one_probe": {**GXPO, "predictor": "replay", "probes": 1},
    "rollback": {**GXPO, "probe_state": "rollback", "k": ROLLBACK_K},
    "fast_forward": {**GXPO, "predictor": "replay", "probe_state": "fast_forward"},
}


def epsilon_of(name):
    return DISPLACEMENT_EPS if name == "displacement" else EPS


def config_of(rule):
    optimizer = {"learning_rate": LR, "weight_decay": DECAY, "max_grad_norm": CLIP}
    optimizer["epsilon"] = epsilon_of(rule.get("predictor"))
    return RunConfig.model_validate({"learner": {"rule": rule, "optimizer": optimizer, "token_budget": 512}})


@functools.cache
def sequences():
    """Prompts of the embedded task, each with its worked answer and with a hasty wrong one; drawn advantages."""
    tokenizer = load_tokenizer(config_of(RULES["grpo"]).model)
    rng = np.random.default_rng(3)
    made = []
    for problem in generate("train", 12, 7):
        prompt = render_messages([{"role": "user", "content": problem.text}], tokenizer)
        for answer in (problem.completion or "", f"\\boxed{{{int(problem.gold) + 3}}}"):
            response = tokenizer(answer + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
            made.append((prompt, np.array(response, dtype=np.int32), float(rng.normal())))
    return made


class Reference:
    """θ, m, v as float64 vectors; gradients by autograd of a full log-softmax, in float64 too: AdamW divides by √v, so
    that rounding in the reference itself would show."""

    def __init__(self, name):
        self.epsilon = epsilon_of(name)
        self.model = load_policy(config_of(RULES["grpo"]).model, precision="fp32").double()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.theta = torch.cat([p.detach().reshape(-1) for p in self.parameters]).double().numpy()
        self.m = np.zeros_like(self.theta)
        self.v = np.zeros_like(self.theta)
        self.t = 0
        self.old = None

    def gradient(self, theta):
        flat = torch.from_numpy(theta)
        offset = 0
        for p in self.parameters:
            p.data.copy_(flat[offset : offset + p.numel()].view_as(p))
            p.grad = None
            offset += p.numel()
        data = sequences()
        tokens = sum(len(r) for _, r, _ in data)
        total, gathered = torch.zeros((), dtype=torch.float64), []
        whole = [torch.from_numpy(np.concatenate([prompt, response])).long() for prompt, response, _ in data]
        # Padded behind the end, where a causal model's earlier tokens do not look.
        logits = self.model(torch.nn.utils.rnn.pad_sequence(whole, batch_first=True)).logits
        for i, (prompt, _, advantage) in enumerate(data):
            logprobs = torch.log_softmax(logits[i, len(prompt) - 1 : len(whole[i]) - 1], -1)
            picked = logprobs.gather(1, whole[i][len(prompt) :, None])[:, 0]
            old = picked.detach() if self.old is None else self.old[i]
            gathered.append(picked.detach())
            ratio = torch.exp(picked - old)
            total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / tokens
        total.backward()
        if self.old is None:
            self.old = gathered
        g = torch.cat([p.grad.reshape(-1) for p in self.parameters]).double().numpy()
        norm = np.linalg.norm(g)
        return g * min(1.0, CLIP / norm)

    def adamw(self, theta, m, v, t, g):
        m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
        change = LR * (m / (1 - BETA1**t)) / (np.sqrt(v / (1 - BETA2**t)) + self.epsilon)
        return theta * (1 - LR * DECAY) - change, m, v

    def optim(self, theta, g):
        self.t += 1
        theta, self.m, self.v = self.adamw(theta, self.m, self.v, self.t, g)
        return theta

    def step(self, name):
        self.old = None
        theta0, saved = self.theta.copy(), (self.m, self.v, self.t)
        g0 = self.gradient(theta0)
        theta1 = self.optim(theta0, g0)
        if name == "grpo":
            self.theta = theta1
            return
        if name == "sfpo":
            theta = theta1
            for _ in range(K - 1):
                theta = self.optim(theta, self.gradient(theta))
            self.correct(theta0 + ALPHA * (theta - theta0))
            return
        if name == "one_probe":
            theta, m, v = theta1, self.m, self.v
            for n in range(1, K):
                theta, m, v = self.adamw(theta, m, v, self.t + n, g0)
            self.correct(theta0 + ALPHA * (theta - theta0))
            return
        g1 = self.gradient(theta1)
        theta2 = self.optim(theta1, g1)
        if name in ("replay", "fast_forward"):
            r = np.where(np.abs(g0) > DELTA, np.clip(g1 / g0, 0, 1), 1.0)
            theta, m, v = theta2, self.m, self.v
            for n in range(2, K):
                theta, m, v = self.adamw(theta, m, v, self.t + n - 1, g1 * r ** (n - 1))
            if name == "fast_forward":
                self.m, self.v, self.t = m, v, self.t + K - 2
            theta_k = theta
        else:
            first, second, active = g0, g1, np.abs(g0) > DELTA
            if name == "displacement":
                kept = 1 - LR * DECAY
                first, second = theta1 - theta0 * kept, theta2 - theta1 * kept
                active = np.abs(first) > LR * DISPLACEMENT_DELTA
            r = np.clip(np.divide(second, first, out=np.ones_like(first), where=active), -2, 3)
            k = ROLLBACK_K if name == "rollback" else K
            scale = np.clip(np.polyval(np.ones(k), r) / (1 + r), 1, k / 2 + 1)
            theta_k = theta0 + (theta2 - theta0) * np.where(active, scale, 1.0)
        if name == "rollback":
            self.m, self.v, self.t = saved
        self.correct(theta0 + ALPHA * (theta_k - theta0))

    def correct(self, theta):
        self.theta = self.optim(theta, self.gradient(theta))


VARIANT = pytest.mark.long("variants of the predictor")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("grpo", "sfpo", "gradient") else VARIANT) for name in RULES]
)
def test_update_agrees_with_a_straight_line_reference(name):
    learner = DeepSpeedLearner(config_of(RULES[name]), master_port=free_port())
    rule = make_rule(learner.config.learner.rule)
    reference = Reference(name)
    scored = [ScoredSequence(p, r, a, np.zeros(len(r), dtype=np.float32)) for p, r, a in sequences()]
    batch = with_scale(scored, token_limit=48)
    for _ in range(2):  # the second step starts from warm moments
        start = reference.theta.copy()
        learner.load_batches([batch])
        rule.step(learner)
        reference.step(name)
        mine = torch.cat([t.reshape(-1) for t in learner.parameters()]).double().numpy()
        error = np.linalg.norm(mine - reference.theta) / np.linalg.norm(reference.theta - start)
        assert error < 1e-3, f"{name}: {error:.2e}"
    learner.close()
