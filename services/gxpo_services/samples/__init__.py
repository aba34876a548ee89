"""Sampled responses with verdicts, and evaluations."""
