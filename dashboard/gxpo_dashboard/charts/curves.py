"""Line charts of a run's metrics, by the part of its view; the search of metrics; reward lines of the table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from urllib.parse import quote

from gxpo_client.formats import percent, significant, size
from gxpo_dashboard.charts.base import SHARE, Plot

REWARD = Plot(
    "reward", "Reward", {"reward/mean": "mean reward", "reward/zero_variance_fraction": "groups without signal"},
    "reward", say=significant, note="A group with equal rewards has no gradient.",
)  # fmt: skip
COMPLETIONS = Plot("loss", "Loss on completions", {"policy/loss": "cross-entropy"}, "nats per token", say=significant)
WARM_START = Plot(
    "warm-start", "Loss of the warm start", {"warm_start/loss": "cross-entropy"}, "nats per token", say=significant,
    note="Supervised steps before the run, whose passes are not in its budget.",
)  # fmt: skip
LOOK_AHEAD = (
    Plot("retention", "Gradient retention",
         {"gxpo/retention_mean": "retention r = g¹/g⁰", "gxpo/retention_std": "spread of r"}, "r",
         note="Over active coordinates, clamped. 1: the gradient did not change in the first step."),
    Plot("scale", "Scale and displacement",
         {"gxpo/scale_mean": "scale S_K(r)/S₂(r)", "gxpo/displacement_ratio": "displacement ratio"}, "factor",
         note="Length of the extrapolation relative to the two probes."),
    Plot("cosine", "Cosine of first and corrective gradient", {"grad/cos_g0_slow": "cos(g⁰, g_slow)"}, "cosine"),
    Plot("norms", "Gradient norms before clipping",
         {"grad/norm_g0": "‖g⁰‖", "grad/norm_g1": "‖g¹‖", "grad/norm_slow": "‖g_slow‖"}, "norm"),
    Plot("fractions", "Inactive or clamped coordinates",
         {"gxpo/inactive_fraction": "inactive coordinates", "gxpo/ratio_clipped_fraction": "clamped ratios"},
         "fraction", SHARE, say=percent),
    Plot("update-norm", "Update norm", {"update/norm": "update norm"}, "‖Δθ‖", ".3~e"),
    Plot("trajectory", "Error relative to a real K-step trajectory",
         {"gxpo/theta_k_relative_error": "θᴷ, relative",
          "gxpo/displacement_cosine_error": "1 − cosine of displacements"}, "error", zero=True),
)  # fmt: skip
POLICY = (
    Plot("entropy", "Policy entropy", {"policy/entropy": "entropy"}, "nats per token"),
    Plot("kl", "KL to the reference", {"policy/kl": "KL to the reference"}, "nats per token", zero=True),
    Plot("clip", "Clipped tokens",
         {"policy/clip_fraction": "clipped tokens", "policy/clip_low_fraction": "at the low side",
          "policy/clip_high_fraction": "at the high side"}, "fraction", SHARE, zero=True, say=percent),
    Plot("length", "Response length", {"rollout/length_mean": "mean length"}, "tokens"),
    Plot("failures", "Responses with grading problems",
         {"rollout/truncated_fraction": "truncated", "verify/unparsed_fraction": "unparsed",
          "verify/timeout_fraction": "timed out", "verify/error_fraction": "grader errors"},
         "fraction", SHARE, zero=True, say=percent),
    Plot("turns", "Environment: turns", {"env/turns_mean": "mean turns"}, "turns per episode", zero=True),
    Plot("episodes", "Environment: ends of episodes",
         {"env/done_fraction": "ended by the environment", "env/timeout_fraction": "timed out",
          "env/error_fraction": "failed"}, "fraction", SHARE, zero=True, say=percent),
)  # fmt: skip
EVALUATED = "eval/average/pass@1"
_GPUS = range(16)
SYSTEM = (
    Plot("overlap", "Overlap and idle time",
         {"time/overlap_fraction": "sampling and update overlap", "time/engine_idle_fraction": "engines idle",
          "time/learner_idle_fraction": "learner idle"}, "fraction", SHARE, zero=True, say=percent,
         note="Overlap as a share of the shorter of sampling and update."),
    Plot("staleness", "Staleness of samples",
         {"rollout/staleness_mean": "mean", "rollout/staleness_max": "maximum"}, "versions", zero=True),
    Plot("gap", "Log-probability gap", {"rollout/logprob_gap_mean": "mean", "rollout/logprob_gap_max": "maximum"},
         "|Δ log π|", ".3~e", log=True,
         note="Between learner and sampler on the step's responses; small if both have the same weights."),
    Plot("memory", "Memory",
         {"system/memory_bytes": "machine", "system/learner_peak_bytes": "learner's peak",
          "system/sampler_peak_bytes": "sampler's peak"}, "bytes", ".3~s", zero=True, say=size),
    Plot("gpu-memory", "GPU memory",
         {"system/learner_device_peak_bytes": "learner's peak"}
         | {f"system/gpu{n}/memory_bytes": f"GPU {n}" for n in _GPUS}, "bytes", ".3~s", zero=True, say=size,
         note="Largest of the step on each GPU of the controller's machine. Learner's peak: most that its first rank "
         "has reserved so far."),
    Plot("gpu", "GPUs", {f"system/gpu{n}/utilization_percent": f"GPU {n}" for n in _GPUS}, "percent", zero=True,
         note="Mean utilization of the step, on the controller's machine."),
    Plot("cpu", "CPU", {"system/cpu_percent": "CPU"}, "percent", zero=True),
    Plot("traffic", "Network and disk",
         {"system/network_sent_bytes_per_s": "network, sent",
          "system/network_received_bytes_per_s": "network, received",
          "system/disk_written_bytes_per_s": "disk, written"}, "bytes per second", ".3~s", zero=True,
         say=lambda value: f"{size(value)} per second",
         note="Of the machine that runs the controller, per second of the step."),
    Plot("disk", "Disk space", {"system/disk_free_bytes": "free"}, "bytes", ".3~s", zero=True, say=size,
         note="On the disk of the run's folder."),
)  # fmt: skip


def sparkline(points: Sequence[tuple[float, float]], color: str) -> str:
    """A line through points (x, y) on scales of its own, as the address of a picture for a table cell. What is not
    finite is a gap, a point without neighbours a dot."""
    values = [y for _, y in points if math.isfinite(y)]
    if not values:
        return ""
    (left, *_), low = points[0], min(values)
    across, up = 92 / ((points[-1][0] - left) or 1), 20 / ((max(values) - low) or 1)
    path, previous = "", math.nan
    for x, y in points:
        if math.isfinite(y):
            place = f"{4 + across * (x - left):.1f} {24 - up * (y - low):.1f}"
            # Round ends make a dot of a move without a line.
            path += f"L{place}" if math.isfinite(previous) else f"M{place}h0"
        previous = y
    style = f"fill='none' stroke='{color}' stroke-width='2.5' stroke-linejoin='round' stroke-linecap='round'"
    drawing = f"<svg xmlns='http://www.w3.org/2000/svg' width='100' height='28'><path d='{path}' {style}/></svg>"
    return f"data:image/svg+xml,{quote(drawing)}"


def matching(names: Sequence[str], prefix: str, text: str) -> list[str]:
    """Names of a group (`gate` of `gate/z`), all groups for an empty one, that contain every word of `text`."""
    words = text.lower().split()
    return [
        name
        for name in sorted(names)
        if prefix in ("", name.partition("/")[0]) and all(word in name.lower() for word in words)
    ]
