"""The metrics that a run can write: the one table of their names and meanings.

docs/metrics.md is rendered from it (`make docs`), and tests hold every name in the trainer's code and in the rows of
real runs against it. In a name, `<word>` stands for one part of a path and `…` for any rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metrics:
    """Metrics that share a description. names: may contain `<word>` and a final `…`. meaning: Markdown."""

    names: tuple[str, ...]
    meaning: str


@dataclass(frozen=True, slots=True)
class Section:
    """Metrics that a reader looks up together. note: Markdown below the title, may be empty."""

    title: str
    note: str
    metrics: tuple[Metrics, ...]


SECTIONS: tuple[Section, ...] = (
    Section(
        "Update",
        "The parameter change of a step, and the backward passes that it cost.",
        (
            Metrics(
                ("update/backward_passes", "update/backward_passes_total"),
                "full-batch gradients of this step; since the start",
            ),
            Metrics(
                ("update/diagnostic_passes_total", "update/repeated_passes_total"),
                "spent on diagnostics; on steps repeated after a recovery",
            ),
            Metrics(("update/norm",), "‖θ after − θ before‖ of the step"),
            Metrics(
                ("update/weights_changed_fraction",),
                "share of the weights, as the forward pass uses them, that the step changed",
            ),
            Metrics(("learning_rate",), "η of the step's optimizer steps"),
        ),
    ),
    Section(
        "Gate",
        "The look-ahead's gate: `value` against the mean and standard deviation of its window.",
        (
            Metrics(("gate/active",), "1 while the look-ahead is on, after this step"),
            Metrics(
                ("gate/value", "gate/z", "gate/mean", "gate/std", "gate/threshold"),
                "the corrective norm (GXPO) or the entropy (SFPO) against its window; no z before the warm-up is over "
                "or after the shut-off",
            ),
            Metrics(("gate/shutoff_step",), "the step that fired the gate"),
        ),
    ),
    Section(
        "Gradients and look-ahead",
        "Norms are global and before clipping.",
        (
            Metrics(("grad/norm_g0", "grad/norm_g1", "grad/norm_slow"), "global gradient norms before clipping"),
            Metrics(("grad/cos_g0_slow",), "cos(g⁰, g_slow), both as the optimizer consumed them"),
            Metrics(
                ("gxpo/retention_mean", "gxpo/retention_std"), "r = g¹/g⁰, clamped as used, over active coordinates"
            ),
            Metrics(
                ("gxpo/scale_mean",), "S_K(r)/S_2(r), clamped as used, over active coordinates; not under `replay`"
            ),
            Metrics(
                ("gxpo/inactive_fraction", "gxpo/ratio_clipped_fraction"),
                "share of coordinates with |g⁰| ≤ δ; share of active ones whose r was clamped",
            ),
            Metrics(("gxpo/displacement_ratio",), "‖θᴷ − θ⁰‖ / ‖θ² − θ⁰‖"),
            Metrics(
                ("gxpo/theta_k_error", "gxpo/theta_k_relative_error"),
                "GXPO and SFPO, every `diagnostics.trajectory_every` steps, against K real steps taken and undone: "
                "median absolute error over coordinates; ‖θᴷ_pred − θᴷ‖/‖θᴷ − θ⁰‖",
            ),
            Metrics(
                ("gxpo/theta_tilde_error", "gxpo/displacement_cosine_error"),
                "the median for θ̃ as the corrective pass uses it, against θ⁰ + α(θᴷ_true − θ⁰); 1 − cosine of the "
                "two displacements",
            ),
            Metrics(("diagnostics/ratio_noise",), "spread of r between two gradients at the same point"),
        ),
    ),
    Section(
        "Policy",
        "",
        (
            Metrics(
                ("policy/loss", "policy/clip_fraction", "policy/kl", "policy/entropy", "policy/advantage_abs_mean"),
                "of the step's last pass",
            ),
            Metrics(
                ("policy/clip_low_fraction", "policy/clip_high_fraction", "policy/ratio_mean"),
                "of the step's last pass",
            ),
            Metrics(("policy/pass<n>/…",), "the same of each pass, n from 1"),
            Metrics(
                ("importance/mean", "importance/max"),
                "importance weights of the samples' tokens at the step's first pass, before "
                '`learner.loss.correction`; with a correction or `proximal = "sampler"`',
            ),
            Metrics(
                ("importance/effective_sample_fraction",),
                "(Σv)²/(N·Σv²) over the same tokens with the weights v after the correction; a masked token has "
                "weight 0",
            ),
        ),
    ),
    Section(
        "Reward and verification",
        "",
        (
            Metrics(
                ("reward/mean", "reward/std", "reward/zero_variance_fraction"),
                "over the step's samples; share of groups whose rewards are all equal",
            ),
            Metrics(("reward/correctness",), "share of verdicts `correct`, of all samples"),
            Metrics(
                ("reward/<component>",),
                "each further reward component without its weight, over the samples that have a reward",
            ),
            Metrics(
                ("reward/http_calls", "reward/http_s", "reward/http_cache_hits"),
                "with a component `http`: requests of the step, retries included; their durations, added up; values "
                "that needed no request. Resampled groups count too",
            ),
            Metrics(("verify/unparsed_fraction", "verify/timeout_fraction", "verify/error_fraction"), "verdicts"),
            Metrics(
                ("verify/evasion_fraction",),
                "`wrong` because the answer asks for more computation than an honest one could ([the "
                "grader](grader.md))",
            ),
        ),
    ),
    Section(
        "Rollouts",
        "",
        (
            Metrics(("rollout/tokens", "rollout/tokens_total"), "sampled tokens of the step; since the start"),
            Metrics(
                ("rollout/tokens_per_s", "rollout/engine_idle_fraction", "rollout/engines_alive"),
                "sampled tokens per second of sampling; share of that time in which an engine ran no step, mean over "
                "engines; engines that were ready at the end of the step",
            ),
            Metrics(
                ("rollout/length_mean", "rollout/length_std", "rollout/truncated_fraction"),
                "sampled tokens of a response; share of responses truncated at `rollout.max_new_tokens`",
            ),
            Metrics(("rollout/prompt_length_mean",), "tokens of the step's prompts"),
            Metrics(
                ("rollout/logprob_gap_mean", "rollout/logprob_gap_max"),
                "|log π_learner − log π_sampler| on the step's own responses",
            ),
            Metrics(
                ("rollout/logprob_gap_max_exceeded",),
                "1 at a step whose largest gap is above `rollout.logprob_gap_max_limit`, with an event "
                "`logprob_gap_outlier`",
            ),
            Metrics(
                ("rollout/weights_version", "rollout/staleness"),
                "oldest version that sampled a token of the step; versions it was behind the learner",
            ),
            Metrics(
                ("rollout/staleness_mean", "rollout/staleness_max"),
                "`rollout.async_depth` ≥ 1: versions that the step's tokens were behind",
            ),
            Metrics(
                ("rollout/dropped_fraction",),
                "`rollout.async_depth` ≥ 1: share of groups that were older than allowed and were sampled again; the "
                "tokens of both count",
            ),
            Metrics(("rollout/resample_rounds",), 'rounds of re-sampling (`learner.loss.zero_variance = "resample"`)'),
        ),
    ),
    Section(
        "Environments",
        "Only in runs with an environment (`environment.name`). Means over the step's episodes.",
        (
            Metrics(("env/turns_mean",), "turns of the policy"),
            Metrics(
                ("env/done_fraction",),
                "episodes that the environment ended; the others reached `environment.max_turns` or "
                "`rollout.max_new_tokens`, or failed",
            ),
            Metrics(
                ("env/timeout_fraction", "env/error_fraction"),
                "episodes whose environment failed; they have no reward and are left out of the loss",
            ),
            Metrics(
                ("env/observation_tokens",),
                "tokens that the environment wrote; they are in no loss and no other metric of tokens",
            ),
        ),
    ),
    Section(
        "Time",
        "In seconds, except for fractions.",
        (
            Metrics(
                ("time/rollout_s", "time/verify_s"),
                "sampling (with `rollout.async_depth` ≥ 1 only the time that the step waited for it); the part of "
                "scoring that sampling did not hide",
            ),
            Metrics(("time/update_s", "time/sync_s", "time/checkpoint_s", "time/evaluate_s"), "parts of a step"),
            Metrics(
                ("time/overlap_fraction",),
                "time in which engines sample and the learner updates, as a share of the shorter of the two: 1 when "
                "one hides the other",
            ),
            Metrics(
                ("time/engine_idle_fraction", "time/learner_idle_fraction"),
                "share of the step in which an engine has no request (mean over engines), and in which the learner "
                "neither updates nor sends weights",
            ),
            Metrics(("time/step_s",), "the step without evaluation, checkpoint and diagnostics"),
            Metrics(("time/training_s",), "sum of `time/step_s`: what every comparison by time uses"),
            Metrics(("time/elapsed_s",), "wall time since the start"),
        ),
    ),
    Section(
        "System",
        "",
        (
            Metrics(
                ("system/cpu_percent", "system/memory_bytes"), "of the controller's host; its load during the step"
            ),
            Metrics(("system/disk_free_bytes",), "on the disk of the run's folder"),
            Metrics(
                (
                    "system/disk_written_bytes_per_s",
                    "system/network_sent_bytes_per_s",
                    "system/network_received_bytes_per_s",
                ),
                "of the controller's host during the step, all processes together and without the loopback interface; "
                "missing where the host does not offer the counter, as in some containers",
            ),
            Metrics(("system/learner_idle_bytes",), "resident set of learner rank 0 before it loaded the model"),
            Metrics(
                ("system/gpu<n>/utilization_percent", "system/gpu<n>/memory_bytes"),
                "each GPU of the controller's host by its NVML index, of all processes: mean and largest of the step, "
                "of one sample a second; missing where `nvidia-ml-py` or the driver is",
            ),
            Metrics(
                ("system/learner_device_peak_bytes",), "on GPUs: most memory that torch reserved on rank 0's device"
            ),
            Metrics(
                ("system/learner_peak_bytes", "system/sampler_peak_bytes"),
                "largest resident set so far of learner rank 0 and of the engine whose sync took longest",
            ),
        ),
    ),
    Section(
        "Evaluation",
        "",
        (
            Metrics(
                ("eval/<benchmark>/pass@1", "eval/<benchmark>/pass@<k>", "eval/<benchmark>/maj@<n>"),
                "each with `/ci_low` and `/ci_high` (95%, bootstrap over problems)",
            ),
            Metrics(
                (
                    "eval/<benchmark>/length_mean",
                    "eval/<benchmark>/truncated_fraction",
                    "eval/<benchmark>/failed_fraction",
                ),
                "responses; verdicts `timeout` or `error`",
            ),
            Metrics(
                ("eval/<benchmark>/full/…",),
                "the same over all problems, at the end (`evaluation.full_at_end`); the others are over the first "
                "`evaluation.num_problems`",
            ),
            Metrics(("eval/average/pass@1",), "macro average"),
        ),
    ),
)


def undescribed(names: Iterable[str]) -> set[str]:
    """Those of `names` that no row of the table covers."""
    patterns = [_pattern(name) for section in SECTIONS for row in section.metrics for name in row.names]
    bare = {re.sub(r"/ci_(low|high)$", "", name) for name in names}
    return {name for name in bare if not any(pattern.fullmatch(name) for pattern in patterns)}


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"<\w+>", "[^/]+", re.escape(name)).replace("…", ".+"))
