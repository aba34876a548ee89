"""Names of metrics used by the service."""

BACKWARD_PASSES, TOKENS, TRAINING_S = "update/backward_passes_total", "rollout/tokens_total", "time/training_s"
SCORE = "eval/average/pass@1"
NEVER_SMOOTHED = "gate/"
"""Prefix of metrics whose averages would mislead: a single step above the threshold fires the gate."""
