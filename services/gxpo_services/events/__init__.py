"""The audit trail of runs and tokens."""
