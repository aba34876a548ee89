"""Timelines of runs: what each process did in the last steps."""
