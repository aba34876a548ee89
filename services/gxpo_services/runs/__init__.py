"""Runs: submission, listing, state changes and deletion."""
