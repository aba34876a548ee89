"""Responses of a policy, their verdicts, and evaluations."""
