"""Line charts of a run's metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gxpo_client.formats import percent, significant, size
from gxpo_dashboard.charts.base import Chart, metric_chart
from gxpo_dashboard.view_models.series import Series

REWARD = {"reward/mean": "mean reward", "reward/zero_variance_fraction": "groups without signal"}
RETENTION = {"gxpo/retention_mean": "retention r = g¹/g⁰", "gxpo/retention_std": "spread of r"}
SCALE = {"gxpo/scale_mean": "scale S_K(r)/S₂(r)", "gxpo/displacement_ratio": "displacement ratio"}
COSINE = {"grad/cos_g0_slow": "cos(g⁰, g_slow)"}
FRACTIONS = {"gxpo/inactive_fraction": "inactive coordinates", "gxpo/ratio_clipped_fraction": "clamped ratios"}
NORMS = {"grad/norm_g0": "‖g⁰‖", "grad/norm_g1": "‖g¹‖", "grad/norm_slow": "‖g_slow‖"}
UPDATE = {"update/norm": "update norm"}
KL = {"policy/kl": "KL to the reference"}
ENTROPY = {"policy/entropy": "entropy"}
CLIP = {
    "policy/clip_fraction": "clipped tokens",
    "policy/clip_low_fraction": "at the low side",
    "policy/clip_high_fraction": "at the high side",
}
GAP = {"rollout/logprob_gap_mean": "mean", "rollout/logprob_gap_max": "maximum"}
LENGTH = {"rollout/length_mean": "mean length"}
FAILURES = {
    "rollout/truncated_fraction": "truncated",
    "verify/unparsed_fraction": "unparsed",
    "verify/timeout_fraction": "timed out",
    "verify/error_fraction": "grader errors",
}
TURNS = {"env/turns_mean": "mean turns"}
EPISODES = {
    "env/done_fraction": "ended by the environment",
    "env/timeout_fraction": "timed out",
    "env/error_fraction": "failed",
}
CPU = {"system/cpu_percent": "CPU"}
MEMORY = {
    "system/memory_bytes": "machine",
    "system/learner_peak_bytes": "learner's peak",
    "system/sampler_peak_bytes": "sampler's peak",
}
_GPUS = range(16)
GPU_LOAD = {f"system/gpu{n}/utilization_percent": f"GPU {n}" for n in _GPUS}
GPU_MEMORY = {"system/learner_device_peak_bytes": "learner's peak"} | {
    f"system/gpu{n}/memory_bytes": f"GPU {n}" for n in _GPUS
}
DISK = {"system/disk_free_bytes": "free"}
TRAFFIC = {
    "system/network_sent_bytes_per_s": "network, sent",
    "system/network_received_bytes_per_s": "network, received",
    "system/disk_written_bytes_per_s": "disk, written",
}
TRAJECTORY = {
    "gxpo/theta_k_relative_error": "θᴷ, relative",
    "gxpo/displacement_cosine_error": "1 − cosine of displacements",
}
NAMES: tuple[str, ...] = (
    *REWARD, *RETENTION, *SCALE, *COSINE, *FRACTIONS, *NORMS, *UPDATE, *KL, *ENTROPY, *CLIP, *GAP, *LENGTH,
    *FAILURES, *TURNS, *EPISODES, *CPU, *MEMORY, *GPU_LOAD, *GPU_MEMORY, *DISK, *TRAFFIC, *TRAJECTORY,
)  # fmt: skip


def reward_chart(series: Series, x: str) -> Chart:
    note = "A group with equal rewards has no gradient."
    return metric_chart("reward", "Reward", series, REWARD, x=x, y_title="reward", say=significant, note=note)


def rule_charts(series: Series, x: str) -> list[Chart]:
    """Charts of the look-ahead; metrics that the rule does not report are omitted."""
    charts = [
        metric_chart(
            "retention", "Gradient retention", series, RETENTION, x=x, y_title="r",
            note="Over active coordinates, clamped. 1: the gradient did not change in the first step.",
        ),
        metric_chart(
            "scale", "Scale and displacement", series, SCALE, x=x, y_title="factor",
            note="Length of the extrapolation relative to the two probes.",
        ),
        metric_chart("cosine", "Cosine of first and corrective gradient", series, COSINE, x=x, y_title="cosine"),
        metric_chart("norms", "Gradient norms before clipping", series, NORMS, x=x, y_title="norm"),
        metric_chart("fractions", "Inactive or clamped coordinates", series, FRACTIONS, x=x, y_title="fraction",
                     form=".1~%", say=percent),
        metric_chart("update-norm", "Update norm", series, UPDATE, x=x, y_title="‖Δθ‖", form=".1~e"),
        metric_chart("trajectory", "Error relative to a real K-step trajectory", series, TRAJECTORY, x=x,
                     y_title="error", zero=True),
    ]  # fmt: skip
    return [chart for chart in charts if not chart.empty]


def policy_charts(series: Series, x: str) -> list[Chart]:
    """Charts of responses; those of the environment only in runs that have one."""
    charts = [
        metric_chart("entropy", "Policy entropy", series, ENTROPY, x=x, y_title="nats per token"),
        metric_chart("kl", "KL to the reference", series, KL, x=x, y_title="nats per token", zero=True),
        metric_chart("clip", "Clipped tokens", series, CLIP, x=x, y_title="fraction", form=".2~%",
                     zero=True, say=percent),
        metric_chart("length", "Response length", series, LENGTH, x=x, y_title="tokens"),
        metric_chart("failures", "Responses with grading problems", series, FAILURES, x=x,
                     y_title="fraction", form=".1~%", zero=True, say=percent),
        metric_chart("turns", "Environment: turns", series, TURNS, x=x, y_title="turns per episode", zero=True),
        metric_chart("episodes", "Environment: ends of episodes", series, EPISODES, x=x, y_title="fraction",
                     form=".0%", zero=True, say=percent),
    ]  # fmt: skip
    return [chart for chart in charts if not chart.empty]


def system_charts(series: Series, x: str) -> list[Chart]:
    gap_note = "Between learner and sampler on the step's responses; small if both have the same weights."
    charts = [
        metric_chart("gap", "Log-probability gap", series, GAP, x=x, y_title="|Δ log π|", form=".0e", log=True,
                     note=gap_note),
        metric_chart("memory", "Memory", series, MEMORY, x=x, y_title="bytes", form=".2~s", zero=True, say=size),
        metric_chart("gpu-memory", "GPU memory", series, GPU_MEMORY, x=x, y_title="bytes", form=".2~s", zero=True,
                     say=size, note="Largest of the step on each GPU of the controller's machine. Learner's peak: most "
                     "that its first rank has reserved so far."),
        metric_chart("gpu", "GPUs", series, GPU_LOAD, x=x, y_title="percent", zero=True,
                     note="Mean utilization of the step, on the controller's machine."),
        metric_chart("cpu", "CPU", series, CPU, x=x, y_title="percent", zero=True),
        metric_chart("traffic", "Network and disk", series, TRAFFIC, x=x, y_title="bytes per second", form=".2~s",
                     zero=True, say=_rate, note="Of the machine that runs the controller, per second of the step."),
        metric_chart("disk", "Disk space", series, DISK, x=x, y_title="bytes", form=".2~s", zero=True, say=size,
                     note="On the disk of the run's folder."),
    ]  # fmt: skip
    return [chart for chart in charts if not chart.empty]


def _rate(value: float) -> str:
    return f"{size(value)} per second"


def rule_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rule's settings of a run's config."""
    rule: Mapping[str, Any] = (config.get("learner") or {}).get("rule") or {}
    return rule


def sparkline(values: Sequence[float], most: int = 30) -> list[float]:
    """At most `most` evenly spaced values, for a table cell."""
    if len(values) <= most:
        return list(values)
    stride = (len(values) - 1) / (most - 1)
    return [values[round(i * stride)] for i in range(most)]
