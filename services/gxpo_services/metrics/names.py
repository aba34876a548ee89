"""Names of metrics used by the service."""

BACKWARD_PASSES, TOKENS, TRAINING_S = "update/backward_passes_total", "rollout/tokens_total", "time/training_s"
SCORE = "eval/average/pass@1"
