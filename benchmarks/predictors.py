"""How well two probes predict θᴷ: every predictor against true K-step trajectories, on the starter policy.

For each learning rate a GRPO run of 20 steps; at steps 5, 10, 15 and 20, on the step's own batch, the relative error
‖θᴷ_predicted − θᴷ_true‖/‖θᴷ_true − θ⁰‖ by the product's own diagnostics. Nothing of the measurement stays behind.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.measure import RESULTS
from benchmarks.small_loop import small_loop
from gxpo_trainer.algo.batch import StepBatch
from gxpo_trainer.config import GxpoRule, RunConfig
from gxpo_trainer.rules.contract import snapshot
from gxpo_trainer.rules.diagnostics import take_trajectory
from gxpo_trainer.rules.grpo import GRPO
from gxpo_trainer.rules.gxpo import GXPO

RATES = (1e-7, 1e-6, 1e-5)
DEPTHS = (3, 5, 10)
PREDICTORS: dict[str, dict[str, Any]] = {
    "gradient": {"predictor": "gradient"},
    "K/2 everywhere": {"predictor": "gradient", "ratio_clip": (1.0 - 1e-7, 1.0 + 1e-7)},
    "displacement": {"predictor": "displacement"},
    "replay": {"predictor": "replay"},
}
CHECKS = (5, 10, 15, 20)


def errors_here(learner: Any, batch: StepBatch) -> dict[str, dict[int, float]]:
    """Relative errors at the present state and batch; the learner is left as it was."""
    errors: dict[str, dict[int, float]] = {name: {} for name in PREDICTORS}
    for k in DEPTHS:
        learner.load_batches([batch])
        truth, _ = take_trajectory(learner, k)
        for name, settings in PREDICTORS.items():
            state = learner.optimizer_state()
            theta, step = snapshot(learner.parameters(), None), state.step
            moments = {n: snapshot(shards, None) for n, shards in state.moments().items()}
            rule = GXPO(GxpoRule.model_validate({"k": k, "gate": {"mode": "never"}, **settings}))
            rule.trajectory = truth
            errors[name][k] = rule.step(learner).metrics["gxpo/theta_k_relative_error"]
            snapshot(theta, learner.parameters())
            for n, shards in state.moments().items():
                snapshot(moments[n], shards)
            state.set_step(step)
            learner.publish()
    learner.load_batches([batch])
    return errors


def main() -> None:
    config = RunConfig.model_validate({"model": {"max_length": 192}, "learner": {"rule": {"name": "grpo"}}})
    table: dict[str, dict[str, list[float]]] = {}
    with small_loop(config) as loop:
        for rate in RATES:
            with loop.learner() as (learner, batches):
                learner.set_learning_rate(rate)
                for step in range(1, CHECKS[-1] + 1):
                    batch = batches.next()
                    learner.load_batches([batch])
                    if step in CHECKS:
                        for name, by_depth in errors_here(learner, batch).items():
                            for k, error in by_depth.items():
                                table.setdefault(name, {}).setdefault(f"lr {rate:g}, K={k}", []).append(error)
                    GRPO().step(learner)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "predictors.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    print("predictors: relative error of θᴷ, range over steps 5, 10, 15, 20")
    for name, cells in table.items():
        for place, errors in cells.items():
            print(f"  {name:15} {place:16} {min(errors):.4f} – {max(errors):.4f}")


if __name__ == "__main__":
    main()
