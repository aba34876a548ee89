"""The training loop: sample → score → update → sync → report, until the first budget is reached.

`Controller.run` is the whole run, `Controller.step` one step. What a step needs from Ray, vLLM and DeepSpeed is in
`rollout`, `learner` and `weights`. Every checkpoint has the state that a crash must not lose: `Counters`, the cursor
and the rule's state. The functions below the controller compute a step's metrics from its rollouts and verdicts.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from gxpo_trainer.algo.batch import StepBatch, learning_rate, make_batch, mini_batches, reward_metrics
from gxpo_trainer.config import RunConfig
from gxpo_trainer.config.tasks import SINGLE_TURN
from gxpo_trainer.errors import Diverged, Interrupted, LearnerDied, TrainingError, VerifierFailed
from gxpo_trainer.learner.group import LearnerGroup
from gxpo_trainer.learner.rank import StepResult
from gxpo_trainer.reporting.reporter import RunReporter
from gxpo_trainer.reporting.uploader import ControlRequest
from gxpo_trainer.rollout.pool import RolloutPool
from gxpo_trainer.rollout.sources import RolloutPlanner, Rollouts, RolloutSource
from gxpo_trainer.rollout.timeline import Span, overlap_fraction
from gxpo_trainer.runtime.processes import HostLoad
from gxpo_trainer.training import proofs
from gxpo_trainer.training.checkpoints import LEARNER, Checkpoint, CheckpointStore
from gxpo_trainer.training.evaluation import Evaluator
from gxpo_trainer.training.progress import TrainingProgress
from gxpo_trainer.types import Metrics, Sample, ScoredGroup

MOST_NONFINITE = 3
"""Consecutive steps without a finite gradient after which a run ends as `diverged`."""
FLAT_STEPS, FLAT_FRACTION = 5, 0.95
"""Consecutive steps with at least this share of groups without signal after which a run warns."""
WARM_START = {
    "policy/loss": "loss",
    "policy/entropy": "entropy",
    "grad/norm_g0": "grad_norm",
    "update/norm": "update_norm",
    "rollout/tokens": "tokens",
    "learning_rate": "learning_rate",
    "time/update_s": "update_s",
    "time/step_s": "step_s",
}
"""A supervised step's metrics, and their names under `warm_start/`, apart from those of the run."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals since the start of the run, over its merged history (see reporting/reading.py).

    step: counts supervised steps of a warm start too; its passes and tokens are not in the other totals. step_passes:
    of the latest step.
    """

    step: int = 0
    backward_passes: float = 0.0
    step_passes: float = 0.0
    diagnostic_passes: float = 0.0
    repeated_passes: float = 0.0
    tokens: int = 0
    training_s: float = 0.0
    elapsed_s: float = 0.0
    nonfinite: int = 0
    flat: int = 0
    warm_start_passes: float = 0.0

    def reached(self, config: RunConfig) -> str | None:
        """The first bound of the budget that is reached, else None."""
        used = {
            "steps": self.step - config.warm_steps,
            "backward_passes": self.backward_passes,
            "hours": self.training_s / 3600,
            "tokens": self.tokens,
        }
        bounds = config.budget.bounds
        return next((name for name, bound in bounds.items() if used[name] >= bound - 1e-9), None)

    def reached_multiple(self, passes: int) -> bool:
        """Whether the latest step has reached a multiple of so many backward passes; its own may be sums of thirds."""
        now, before = self.backward_passes, self.backward_passes - self.step_passes
        return math.floor(now / passes + 1e-9) > math.floor(before / passes + 1e-9)

    def learning_rate(self, config: RunConfig) -> float:
        """η of the next step. A budget of backward passes counts in steps with the look-ahead on."""
        budget, step = config.budget, self.step + 1 - config.warm_steps
        done, total = float(step - 1), budget.steps and float(budget.steps)
        if total is None and budget.backward_passes is not None:
            per_step = config.learner.rule.passes_per_step(gate_open=True)
            done, total = self.backward_passes / per_step, budget.backward_passes / per_step
        return learning_rate(config.learner.optimizer, step, done, total)


@dataclass(frozen=True, slots=True)
class Runtime:
    """What a run consists of while it trains. `close` ends its processes."""

    config: RunConfig
    learners: LearnerGroup
    pool: RolloutPool
    planner: RolloutPlanner
    rollouts: RolloutSource

    def close(self) -> None:
        self.learners.close()
        self.pool.kill()


class Controller:
    """Drives one run, whose parts `build_runtime` has made; `train_run` closes them.

    attempt: number of this attempt. repeated_passes: see checkpoints.repeated_passes.
    """

    def __init__(
        self,
        runtime: Runtime,
        evaluator: Evaluator,
        reporter: RunReporter,
        store: CheckpointStore,
        progress: TrainingProgress,
        *,
        attempt: int = 1,
        repeated_passes: float = 0.0,
        control_request: Callable[[], ControlRequest | None] = lambda: None,
        enter_phase: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self.config, self.watch = runtime.config, runtime.pool.group.watch
        self.learners, self.pool, self.planner = runtime.learners, runtime.pool, runtime.planner
        self.rollouts, self.evaluator = runtime.rollouts, evaluator
        self.reporter, self.store, self.progress = reporter, store, progress
        self.control_request, self.enter_phase = control_request, enter_phase
        self.host = HostLoad(reporter.out_dir)
        self.counters = Counters(repeated_passes=repeated_passes)
        self.attempt = attempt
        self._elapsed_base = 0.0
        self._begun = time.perf_counter()
        self._score: float | None = None
        self._rate = 0.0
        self._evaluated = self._saved = -1
        self.ready = False
        """Whether all processes have started and passed the canary; an earlier failure is a failed setup."""

    # ---- the run --------------------------------------------------------------------------------------------

    def run(self, resume_from: Checkpoint | None) -> str:
        """Train until the budget is spent or a pause or cancel request arrives; returns which of them ended the run."""
        if (request := self.control_request()) is not None:
            return request  # there is nothing yet to keep in a checkpoint
        evaluation_due = resume_from.state.get("evaluation_owed") if resume_from else self.config.evaluation.at_start
        recoveries = 0
        start: Callable[[], None] | None = partial(self._start, resume_from)
        while True:
            try:
                if start is not None:
                    with self.watch.abandonable():
                        start()
                    start = None
                if evaluation_due and self.control_request() is None:
                    self._evaluate()
                evaluation_due = False
                if (ended := self._next()) is not None:
                    return ended
            except Interrupted:
                if start is not None:
                    return "pause"  # the last checkpoint is what there is
                continue  # to the request that the same signal made
            except LearnerDied as error:
                recoveries += 1
                if recoveries > self.config.placement.max_restarts:
                    raise TrainingError(f"the learner died {recoveries} times ({error}); see events.jsonl") from error
                start = partial(self._recover, error)

    def _start(self, resume_from: Checkpoint | None) -> None:
        """Start the processes and the run."""
        self.enter_phase("starting engines")
        if resume_from is not None:
            self._elapsed_base = resume_from.state["counters"]["elapsed_s"]
        if self.config.needs_engines:
            self.pool.start()
        self.learners.start()
        self._begin(resume_from)

    def _begin(self, checkpoint: Checkpoint | None) -> None:
        """Load the policy into all processes, and prove that they agree."""
        self._resume(checkpoint)
        if self.config.needs_engines:
            proofs.canary(self.config, self.learners, self.pool, self.planner)
        self._sync()
        if self.config.needs_engines:
            self._log_placement()
        self.reporter.log_event("attention", f"attention: {self.learners.attention}")
        self.ready = True

    def _next(self) -> str | None:
        """One step; or, when the run ends here, its last evaluation and checkpoint, and what ended it."""
        step = self.counters.step
        ended = self.counters.reached(self.config)
        complete = ended is not None and self._evaluated == step
        if not complete and (request := self.control_request()) is not None:
            if request == "pause" and self._saved != step:
                self._checkpoint(last=True)
            return request
        if ended is not None:
            if self._evaluated != step:
                self._evaluate()
            if self._saved != step:
                self._checkpoint(last=True)
            return ended
        self.step()
        return None

    def step(self) -> None:
        """One training step: every pass of the rule uses this one batch. Raises Interrupted before the update, with the
        prompts put back."""
        self.enter_phase("training")
        begin = self.watch.working_s
        self.host.begin_step()
        number = self.counters.step + 1
        window = self.pool.timeline.now()
        cursor = self.rollouts.state_dict()
        try:
            with self.watch.abandonable():
                rollouts = self.rollouts.batch(number)
        except Interrupted:
            self.rollouts.discard()
            self.rollouts.load_state_dict(cursor)
            raise
        if isinstance(rollouts, StepBatch):
            result, metrics = self._learn_completions(number, rollouts)
        else:
            result, metrics = self._learn_rewards(number, rollouts)
        synced = self._sync()
        if "time/sync_s" in synced:
            synced["time/sync_s"] += metrics.get("time/sync_s", 0.0)  # of one that was put off until this step
        metrics.update(synced)
        spans = self.pool.timeline.cut(window)
        if self.config.needs_engines and number > self.config.warm_steps:
            metrics.update(overlap_metrics(spans, window, len(self.pool.engines.all)))
        if not isinstance(rollouts, StepBatch):  # before the metrics, which trackers follow
            self.reporter.log_samples(number, rollouts.groups)
        self._report(number, metrics, result, self.watch.working_s - begin - result.diagnostics_s)
        self.reporter.log_timeline(number, window, spans)
        if self.counters.nonfinite >= MOST_NONFINITE:
            rate = "warm_start" if number <= self.config.warm_steps else "learner.optimizer"
            raise Diverged(
                f"loss or gradient norm was not finite in {MOST_NONFINITE} steps in a row up to step {number}; lower "
                f"{rate}.learning_rate or learner.optimizer.max_grad_norm"
            )
        if self._due(number, "evaluate") and self.control_request() is None:
            self._evaluate()
        if self._due(number, "checkpoint"):
            self._checkpoint()

    # ---- parts of a step ------------------------------------------------------------------------------------

    def _learn_rewards(self, number: int, rollouts: Rollouts) -> tuple[StepResult, Metrics]:
        synced = self._sync() if self.rollouts.sync_due else {}
        try:
            proofs.check_verdicts(self.config, rollouts.sampled)
        except VerifierFailed:
            self.reporter.log_samples(number, rollouts.sampled)  # with their reasons
            raise
        learner, limit = self.config.learner, self.config.rollout.max_new_tokens
        distilled = self.config.teacher is not None
        batch, metrics = make_batch(rollouts.groups, learner.loss, limit, learner.advantage, distilled=distilled)
        result = self._update(number, batch, rollouts.num_tokens)
        outlier, fresh = None, min(scored.group.weights_version for scored in rollouts.groups) == number - 1
        # The learner's own log-probabilities may not be finite in a step that is skipped.
        if fresh and result.finite and result.gap_mean is not None and result.gap_max is not None:
            outlier = proofs.check_gap(self.config, result.gap_mean, result.gap_max, number)
        metrics.update(result.metrics)
        metrics.update(rollout_metrics(rollouts, result, version=number - 1, total=self.counters.tokens))
        if self.config.data.embedded and self.config.environment.name == SINGLE_TURN:
            metrics.update(careful_metrics(rollouts.groups))
        if self.config.rollout.async_depth:
            metrics.update(staleness_metrics(rollouts, version=number - 1))
        if outlier:
            self.reporter.log_event("logprob_gap_outlier", outlier, step=number)
            metrics["rollout/logprob_gap_max_exceeded"] = 1.0
        return result, {**metrics, **synced, "time/rollout_s": rollouts.rollout_s, "time/verify_s": rollouts.verify_s}

    def _learn_completions(self, number: int, batch: StepBatch) -> tuple[StepResult, Metrics]:
        lengths = [sequence.num_sampled for sequence in batch.sequences]
        result = self._update(number, batch, sum(lengths))
        prompts = [len(sequence.prompt_ids) for sequence in batch.sequences]
        return result, result.metrics | token_metrics(sum(lengths), self.counters.tokens, lengths, prompts)

    def _update(self, number: int, batch: StepBatch, num_tokens: int) -> StepResult:
        """Let the learner take the step, and count it: one of a warm start apart from the run's."""
        config, old = self.config, self.counters
        learner, warm_start = config.learner, config.warm_start
        with self.pool.timeline.during("learner", "updating"):
            if warm_start is not None and number <= warm_start.steps:
                settings = warm_start.model_dump(include={"learning_rate", "schedule", "warmup_steps"})
                optimizer = learner.optimizer.model_copy(update=settings)
                self._rate = learning_rate(optimizer, number, number - 1, warm_start.steps)
                result = self.learners.train_step([batch], self._rate, stage="warm_start")
                counted = replace(old, warm_start_passes=old.warm_start_passes + result.backward_passes)
            else:
                self._rate = old.learning_rate(config)
                result = self.learners.train_step(
                    mini_batches(batch, learner.mini_batches),
                    self._rate,
                    diagnose=self._due(number, "trajectory"),
                    stage="first" if number == config.warm_steps + 1 > 1 else "run",
                )
                counted = replace(
                    old,
                    backward_passes=old.backward_passes + result.backward_passes,
                    step_passes=result.backward_passes,
                    diagnostic_passes=old.diagnostic_passes + result.diagnostic_passes,
                    tokens=old.tokens + num_tokens,
                )
        nonfinite = 0 if result.finite else old.nonfinite + 1
        self.counters = replace(counted, step=number, nonfinite=nonfinite)
        return result

    def _sync(self) -> Metrics:
        begin = self.watch.working_s
        synced = self.rollouts.sync(self.counters.step)
        if synced is None:
            return {}
        metrics: Metrics = {
            "time/sync_s": self.watch.working_s - begin,
            "system/sampler_peak_bytes": float(synced.peak_bytes),
        }
        if synced.changed_fraction is not None:
            metrics["update/weights_changed_fraction"] = synced.changed_fraction
        return metrics

    def _log_placement(self) -> None:
        """Record the nodes of all processes where there are several, and the weight transport."""
        learner, samplers = self.learners.nodes(), [engine.node for engine in self.pool.engines.ready]
        if {*learner} != {*samplers}:
            ranks, engines = (", ".join(node[:8] for node in nodes) for nodes in (learner, samplers))
            message = f"learner ranks on Ray nodes {ranks}; samplers on nodes {engines}"
            self.reporter.log_event("several_nodes", message, learner_nodes=learner, sampler_nodes=samplers)
        chosen = self.learners.transport
        self.reporter.log_event("weight_transport", f"weights are sent by {chosen}", transport=chosen)

    def _report(self, number: int, metrics: Metrics, result: StepResult, spent: float) -> None:
        warm = number <= self.config.warm_steps
        trained_s = self.counters.training_s + (0.0 if warm else spent)
        counters = replace(self.counters, elapsed_s=self._elapsed(), training_s=trained_s)
        metrics["learning_rate"] = self._rate
        metrics["update/backward_passes"] = result.backward_passes
        metrics["time/update_s"], metrics["time/step_s"] = result.update_s, spent
        if warm:
            system = {name: value for name, value in metrics.items() if name.startswith("system/")}
            metrics = {f"warm_start/{ours}": metrics[name] for name, ours in WARM_START.items() if name in metrics}
            metrics.update(system)
        if "gate/shutoff_step" in metrics:  # of the rule, which has not seen the warm start
            metrics["gate/shutoff_step"] += self.config.warm_steps
        if self.config.warm_start is not None:
            metrics["warm_start/backward_passes_total"] = counters.warm_start_passes
        metrics["update/backward_passes_total"] = counters.backward_passes
        metrics["time/training_s"] = counters.training_s
        metrics["time/elapsed_s"] = counters.elapsed_s
        if counters.diagnostic_passes:
            metrics["update/diagnostic_passes_total"] = counters.diagnostic_passes
        if counters.repeated_passes:
            metrics["update/repeated_passes_total"] = counters.repeated_passes
        metrics.update(self.host.metrics())
        metrics["system/learner_peak_bytes"] = float(result.peak_bytes)
        learner = self.config.learner
        relative = learner.advantage.name in ("group", "maxrl") or learner.loss.zero_variance != "keep"
        flat = metrics.get("reward/zero_variance_fraction", 0.0) >= FLAT_FRACTION and self.config.teacher is None
        flat = flat and relative  # other advantages of equal rewards need not be 0
        self.counters = replace(counters, flat=counters.flat + 1 if flat else 0)
        if self.counters.flat >= FLAT_STEPS:
            metrics["reward/no_signal"] = 1.0
        self.reporter.log_metrics(number, metrics)
        if result.fallback:
            self.reporter.log_event("fallback", f"step {number}: {result.fallback}", step=number)
        if metrics.get("gate/shutoff_step") == number:
            why = f"z = {metrics['gate/z']:.2f}, threshold {metrics['gate/threshold']:g}"
            self.reporter.log_event("gate_fired", f"step {number}: the gate ended the look-ahead ({why})", step=number)
        self.progress.update(number, metrics)
        if self.counters.flat == FLAT_STEPS:
            verifier = self.config.verifier
            own = bool(verifier.worker_rewards or verifier.http_rewards)
            warning = f"step {number}: {no_signal(metrics, own=own)}"
            self.reporter.log_event("no_signal", warning, step=number)
            self.progress.message(warning)

    def _due(self, step: int, what: str) -> bool:
        if what != "checkpoint":
            # From the end of a warm start, so that rules with other passes per step are evaluated at equal passes.
            step -= self.config.warm_steps
            if step <= 0:
                return what == "evaluate" and step == 0
        if what == "evaluate" and (passes := self.config.evaluation.every_backward_passes):
            return self.counters.reached_multiple(passes)
        every = {
            "evaluate": self.config.evaluation.every_steps,
            "checkpoint": self.config.checkpoint.every_steps,
            "trajectory": self.config.diagnostics.trajectory_every,
        }[what]
        return every > 0 and step % every == 0

    def _evaluate(self) -> None:
        self.enter_phase("evaluating")
        begin = time.perf_counter()
        step, timeline = self.counters.step, self.pool.timeline
        window = timeline.now()
        if ended := self.counters.reached(self.config) is not None:
            self.rollouts.finish()
        full = self.config.evaluation.full_at_end and ended
        with self.watch.abandonable(), timeline.during("evaluation", "evaluating"):
            records, metrics = self.evaluator.run(self.rollouts, version=step, full=full)
        for record in records:
            totals = {
                "backward_passes_total": self.counters.backward_passes,
                "training_s": self.counters.training_s,
                "tokens_total": self.counters.tokens,
            }
            self.reporter.log_evaluation(step, {**record, **totals})
        self._score = metrics.get("eval/average/pass@1")
        metrics["time/evaluate_s"] = time.perf_counter() - begin
        self.reporter.log_metrics(step, metrics)
        self.reporter.log_timeline(step, window, timeline.cut(window))
        if records:
            self.progress.message(self.evaluator.describe(step, metrics))
        self._evaluated = step
        if self._saved == step and self._score is not None:
            with contextlib.suppress(OSError):  # such as a full disk; the checkpoint stays valid without it
                self.store.record_score(step, self._score)

    # ---- checkpoints and recovery ---------------------------------------------------------------------------

    def _checkpoint(self, *, last: bool = False) -> None:
        """Save the present step. On a failed write training continues; with `last`, where nothing follows that could
        save the policy, it raises TrainingError."""
        self.enter_phase("checkpointing")
        begin = time.perf_counter()
        step = self.counters.step
        evaluated = self._evaluated == step
        wanted = self._due(step, "evaluate") if step else self.config.evaluation.at_start
        state: dict[str, Any] = {
            "counters": asdict(replace(self.counters, elapsed_s=self._elapsed())),
            "cursor": self.rollouts.state_dict(),
            "attempt": self.attempt,
            "config_sha256": self.config.sha256(),
            "evaluation_owed": wanted and not evaluated,
        }
        self.reporter.sync()
        try:
            self.store.save(step, state, self.learners.save, score=self._score if evaluated else None)
        except OSError as error:
            cause = getattr(error, "cause", error)  # without a rank's stack
            self.reporter.log_event("checkpoint_failed", f"step {step}: {cause}", step=step)
            failed = f"checkpoint at step {step} could not be written: {cause}"
            if last:
                raise TrainingError(f"the last {failed}; free disk space, then resume") from error
            # The earlier checkpoint is still valid, so training continues.
            self.progress.message(f"{failed}; the earlier one is kept")
            return
        self._saved = step
        self.reporter.log_event("checkpoint", f"step {step} saved", step=step)
        self.reporter.log_metrics(step, {"time/checkpoint_s": time.perf_counter() - begin})

    def _resume(self, checkpoint: Checkpoint | None) -> None:
        """Continue from a checkpoint, or from the start policy."""
        self._evaluated, self._saved = -1, checkpoint.step if checkpoint else -1
        if checkpoint is None:
            self.reporter.start_attempt(self.attempt, self.counters.step)
            return
        resharded = self.learners.load(checkpoint.path / LEARNER, checkpoint.state["rule"])
        if resharded is not None:
            self.reporter.log_event("resharded", resharded, step=checkpoint.step)
            self.progress.message(resharded)
        repeated = self.counters.repeated_passes
        self.counters = Counters(**checkpoint.state["counters"])
        self.counters = replace(self.counters, repeated_passes=max(repeated, self.counters.repeated_passes))
        # With other settings (another end, more problems) the evaluation at the end is another one.
        same = checkpoint.state.get("config_sha256") == self.config.sha256()
        if same and checkpoint.state.get("score") is not None:
            self._evaluated = checkpoint.step
        self.rollouts.load_state_dict(checkpoint.state["cursor"])
        self.reporter.start_attempt(self.attempt, self.counters.step, int(checkpoint.state["attempt"]))

    def _recover(self, error: LearnerDied) -> None:
        """Start a new attempt from the last valid checkpoint. Raises TrainingError when it cannot start."""
        lost = self.counters
        self.reporter.log_event("learner_died", str(error), step=lost.step + 1, attempt=self.attempt)
        self.attempt += 1
        checkpoint, problems = self.store.latest_valid()
        for problem in problems:
            self.reporter.log_event("checkpoint_skipped", problem)
        kept = checkpoint.state["counters"]["backward_passes"] if checkpoint else 0.0
        # A learner that died before it had loaded its checkpoint has lost nothing.
        self.counters = Counters(repeated_passes=lost.repeated_passes + max(0.0, lost.backward_passes - kept))
        self.enter_phase("starting engines")
        try:
            self.rollouts.discard()
            self.learners.restart()
            if checkpoint is None:
                self.rollouts.restart()
            if self.ready:
                self._resume(checkpoint)
                self._sync()
            else:
                self._begin(checkpoint)
        except LearnerDied as second:
            raise TrainingError(f"the learner died again during its recovery: {second}") from second
        where = f"step {checkpoint.step}" if checkpoint else "the start"
        self.progress.message(f"the learner died; attempt {self.attempt} continues from {where}")

    def _elapsed(self) -> float:
        return self._elapsed_base + time.perf_counter() - self._begun


def token_metrics(num_tokens: int, total: int, lengths: Sequence[int], prompt_lengths: Sequence[int]) -> Metrics:
    """`rollout/…` of a step's tokens, of those since the start, and of the tokens in each response and prompt."""
    return {
        "rollout/tokens": float(num_tokens),
        "rollout/tokens_total": float(total),
        "rollout/length_mean": float(np.mean(lengths)),
        "rollout/length_std": float(np.std(lengths)),
        "rollout/prompt_length_mean": float(np.mean(prompt_lengths)),
    }


def rollout_metrics(rollouts: Rollouts, result: StepResult, *, version: int, total: int) -> Metrics:
    """`rollout/…`, `reward/…` and `verify/…` of one step.

    version: of the learner before the step. total: sampled tokens since the start. `verify/…` and `env/…` are shares of
    all that was sampled, the others of what is learned from.
    """
    samples = [sample for group in rollouts.groups for sample in group.group.samples]
    lengths = [sample.num_sampled for sample in samples]
    prompts = [len(group.group.prompt_token_ids) for group in rollouts.groups]
    graded = [v.status for group in rollouts.groups for v in group.verdicts if v.status != "ungraded"]
    verdicts = [verdict for group in rollouts.sampled for verdict in group.verdicts]
    statuses = Counter(verdict.status for verdict in verdicts)
    oldest = min(group.group.weights_version for group in rollouts.groups)
    metrics: Metrics = {
        **token_metrics(rollouts.num_tokens, total, lengths, prompts),
        "rollout/engine_idle_fraction": rollouts.idle_fraction,
        "rollout/engines_alive": float(rollouts.engines_alive),
        "rollout/truncated_fraction": float(np.mean([sample.truncated for sample in samples])),
        "rollout/weights_version": float(oldest),
        "rollout/staleness": float(version - oldest),
    }
    gap = {"rollout/logprob_gap_mean": result.gap_mean, "rollout/logprob_gap_max": result.gap_max}
    metrics |= {name: value for name, value in gap.items() if value is not None}
    if rollouts.sampling_s:
        metrics["rollout/tokens_per_s"] = rollouts.num_tokens / rollouts.sampling_s
    if graded:
        metrics["reward/correctness"] = graded.count("correct") / len(graded)
    metrics.update(component_means(rollouts.groups))
    metrics.update(source_metrics(rollouts.groups))
    metrics.update(environment_metrics([sample for group in rollouts.sampled for sample in group.group.samples]))
    metrics |= {
        f"verify/{status}_fraction": statuses[status] / len(verdicts) for status in ("unparsed", "timeout", "error")
    }
    metrics["verify/evasion_fraction"] = sum(verdict.evades for verdict in verdicts) / len(verdicts)
    if (http := rollouts.http) is not None:
        metrics["reward/http_calls"] = float(http.calls)
        metrics["reward/http_s"] = http.seconds
        metrics["reward/http_cache_hits"] = float(http.cache_hits)
    if rollouts.num_resampled:
        metrics["rollout/resample_rounds"] = float(rollouts.num_resampled)
    return metrics


def no_signal(metrics: Metrics, *, own: bool) -> str:
    """What it means that almost all groups of the last steps have equal rewards, and what to do.

    own: whether the reward is not correctness alone."""
    truncated, correct = f"{metrics['rollout/truncated_fraction']:.0%}", metrics.get("reward/correctness")
    responses = f"{truncated} of the responses are truncated"
    if correct is not None:
        responses = f"{correct:.0%} of the responses are correct and {truncated} truncated"
    if own:
        responses = f"mean reward {metrics['reward/mean']:.3f}, {responses}"
        advice = "if that is the highest reward, nothing is left to learn; else choose problems or rewards that tell "
        advice += "the responses apart"
    elif correct is not None and correct > 0.5:
        advice = "choose harder problems"
    else:
        advice = "choose problems that the model solves sometimes, raise rollout.max_new_tokens, or fine-tune the "
        advice += "model on worked answers first (`gxpo sft`)"
    return (
        f"no signal for {FLAT_STEPS} steps: the responses of a problem have equal rewards in "
        f"{metrics['reward/zero_variance_fraction']:.0%} of the groups, which have no gradient; {responses}: {advice}"
    )


def careful_metrics(groups: Sequence[ScoredGroup]) -> Metrics:
    """`response/…`: share of responses to an embedded task that write a calculation down, and are correct."""
    answers = [
        ("=" in sample.text, verdict.status == "correct")
        for group in groups
        for sample, verdict in zip(group.group.samples, group.verdicts, strict=True)
    ]
    careful = [correct for calculates, correct in answers if calculates]
    correctness = {"response/careful_correctness": sum(careful) / len(careful)} if careful else {}
    return {"response/careful_fraction": len(careful) / len(answers), **correctness}


def environment_metrics(samples: Sequence[Sample]) -> Metrics:
    """`env/…`: means over the episodes; empty without an environment."""
    pairs = [(sample, sample.episode) for sample in samples if sample.episode is not None]
    if not pairs:
        return {}
    ends = Counter(episode.end for _, episode in pairs)
    metrics: Metrics = {}
    if any(sample.prompt_token_ids is not None for sample, _ in pairs):  # of agents
        metrics["env/branches_mean"] = float(np.mean([len(sample.branches) for sample, _ in pairs]))
    turns = [sum(turn.speaker == "policy" for turn in episode.turns) for _, episode in pairs]
    metrics |= {f"env/{end}_fraction": ends[end] / len(pairs) for end in ("done", "timeout", "error")}
    metrics["env/turns_mean"] = float(np.mean(turns))
    metrics["env/observation_tokens"] = float(np.mean([sample.num_observed for sample, _ in pairs]))
    return metrics


def staleness_metrics(rollouts: Rollouts, *, version: int) -> Metrics:
    """How many versions behind the learner's the sampled tokens are, and what was dropped for it."""
    tokens: Counter[int] = Counter()
    for scored in rollouts.groups:
        for sample in scored.group.samples:
            for sampled_by, count in sample.sampled_versions:
                tokens[version - sampled_by] += count
    groups = len(rollouts.groups) + rollouts.num_dropped
    # No token at all: the first messages of every episode failed.
    mean = sum(behind * count for behind, count in tokens.items()) / max(1, tokens.total())
    return {
        "rollout/staleness_mean": mean,
        "rollout/staleness_max": float(max(tokens, default=0)),
        "rollout/dropped_fraction": rollouts.num_dropped / groups,
    }


def overlap_metrics(spans: Sequence[Span], begin: float, num_engines: int) -> Metrics:
    """`time/…` of the spans since `begin`: what overlapped, and how long engines and learner were idle."""
    elapsed = max((span.end for span in spans), default=begin) - begin
    if elapsed <= 0:
        return {}
    learner = sum(span.seconds for span in spans if span.process == "learner")
    engines = sum(span.seconds for span in spans if span.process.startswith("engine"))
    overlap = overlap_fraction(spans, "sampling", "updating")
    return {
        "time/learner_idle_fraction": 1 - learner / elapsed,
        "time/engine_idle_fraction": 1 - engines / (num_engines * elapsed),
        **({} if overlap is None else {"time/overlap_fraction": overlap}),
    }


def component_means(groups: Sequence[ScoredGroup]) -> Metrics:
    """`reward/<component>`: the plain value of each reward component, over the samples that have a reward.

    Correctness is a metric of its own, whether it is a component or not: a share of verdicts.
    """
    rewards = [v.reward_components for group in groups for v in group.verdicts if v.reward is not None]
    names = dict.fromkeys(name for values in rewards for name in values if name != "correctness")
    return {f"reward/{name}": float(np.mean([v[name] for v in rewards if name in v])) for name in names}


def source_metrics(groups: Sequence[ScoredGroup]) -> Metrics:
    """`reward/source/…`: mean reward and share of groups without signal of each data source; empty with a single one.

    A source without any reward in the step is left out.
    """
    metrics: Metrics = {}
    for label in dict.fromkeys(scored.group.prompt.source for scored in groups):
        own = [[v.reward for v in scored.verdicts] for scored in groups if scored.group.prompt.source == label]
        if label and (of_source := reward_metrics(own)):
            metrics[f"reward/source/{label}"] = of_source["reward/mean"]
            metrics[f"reward/source/{label}/zero_variance_fraction"] = of_source["reward/zero_variance_fraction"]
    return metrics
