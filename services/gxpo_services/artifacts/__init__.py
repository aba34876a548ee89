"""Runs' folders on disk: safe reading and removal."""
