"""Draws one step of each rule on a loss of two parameters, by running the rules themselves: `make docs`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from support.toy_learner import ToyLearner, quadratic
from torch import Tensor

from gxpo_trainer.config import EpochsRule, ExtragradientRule, GateConfig, GrpoRule, GxpoRule, RuleSettings, SfpoRule
from gxpo_trainer.rules.contract import BackwardResult, make_rule

IMAGES = Path(__file__).parents[1] / "docs" / "images" / "algorithms"
OPEN = GateConfig(mode="never")
RULES: dict[str, tuple[str, RuleSettings, float]] = {
    "grpo": ("GRPO: 1 pass", GrpoRule(), 1.0),
    "grpo-longer-step": ("GRPO at 3.5 × the learning rate: 1 pass", GrpoRule(), 3.5),
    "sfpo": ("SFPO K=5: 6 passes", SfpoRule(k=5, alpha=0.5, gate={"mode": "never"}), 1.0),
    "gxpo": ("GXPO K=5: 3 passes", GxpoRule(k=5, alpha=0.5, gate=OPEN), 1.0),
    "epochs": ("Epochs K=3: 3 passes", EpochsRule(k=3), 1.0),
    "extragradient": ("Extragradient: 2 passes", ExtragradientRule(), 1.0),
}
"""File name → title, rule, factor of the learning rate."""
RATE = 0.1
START = torch.tensor([-2.6, 1.1], dtype=torch.float64)
ANGLE, CURVATURES = 0.5, (0.5, 3.5)


@dataclass
class Recorded:
    """Where a step took gradients, and where optimizer steps led."""

    passes: list[Tensor] = field(default_factory=list)
    updates: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class RecordingLearner(ToyLearner):
    """Gradient descent on the loss of the pictures, with a record of the step."""

    def __init__(self, rate: float) -> None:
        super().__init__(START, quadratic(_hessian()), lr=rate)
        self.record = Recorded()

    def backward(self) -> BackwardResult:
        self.record.passes.append(self.flat().clone())
        return super().backward()

    def optimizer_step(self) -> None:
        before = self.flat().clone()
        super().optimizer_step()
        self.record.updates.append((before, self.flat().clone()))


def _hessian() -> Tensor:
    turn = torch.tensor([[np.cos(ANGLE), -np.sin(ANGLE)], [np.sin(ANGLE), np.cos(ANGLE)]], dtype=torch.float64)
    return turn @ torch.diag(torch.tensor(CURVATURES, dtype=torch.float64)) @ turn.T


def _looked_ahead(settings: RuleSettings, repositioned: Tensor) -> Tensor:
    """θᴷ from θ̃ = θ⁰ + α(θᴷ − θ⁰)."""
    return START + (repositioned - START) / float(getattr(settings, "alpha", 1.0))


def draw(name: str) -> Figure:
    """One step: numbered circles are gradients, arrows optimizer steps, dashed lines moves without a gradient (the
    diamond is θᴷ), the star is the end of the step, the cross the minimum."""
    title, settings, factor = RULES[name]
    learner = RecordingLearner(RATE * factor)
    make_rule(settings).step(learner)
    record, end = learner.record, learner.flat()
    figure = Figure(figsize=(5, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    x, y = np.meshgrid(np.linspace(-3.1, 0.9, 200), np.linspace(-1.5, 1.7, 200))
    h = _hessian().numpy()
    loss = 0.5 * (h[0, 0] * x * x + 2 * h[0, 1] * x * y + h[1, 1] * y * y)
    axes.contour(x, y, loss, levels=np.geomspace(0.03, 12, 12), colors="#b8c4d0", linewidths=0.8)
    position = START
    for before, after in record.updates:
        if not torch.equal(before, position):
            virtual = [position, _looked_ahead(settings, before), before]
            axes.plot(*torch.stack(virtual).T.tolist(), ls="--", color="#D55E00", lw=1.3)
            axes.plot(*virtual[1].tolist(), marker="D", color="#D55E00", ms=6)
        arrow = {"arrowstyle": "->", "color": "#0072B2", "lw": 1.5}
        axes.annotate("", tuple(after.tolist()), tuple(before.tolist()), arrowprops=arrow)
        position = after
    for number, point in enumerate(record.passes, start=1):
        axes.plot(*point.tolist(), marker="o", mfc="white", mec="#0072B2", ms=9)
        axes.annotate(str(number), tuple(point.tolist()), ha="center", va="center", fontsize=7)
    axes.plot(*START.tolist(), marker="o", color="#000000", ms=3, zorder=0)
    axes.plot(*end.tolist(), marker="*", color="#009E73", ms=14)
    axes.plot(0, 0, marker="+", color="#555555", ms=10)
    axes.set(title=title, xticks=(), yticks=(), aspect="equal", xlim=(-3.1, 0.9), ylim=(-1.5, 1.7))
    return figure


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name in RULES:
        draw(name).savefig(IMAGES / f"{name}.png", metadata={"Software": None})
