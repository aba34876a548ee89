"""Runs' folders on disk: safe access and removal."""
