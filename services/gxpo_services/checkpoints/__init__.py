"""Checkpoints on disk: listing, and download of a policy."""
