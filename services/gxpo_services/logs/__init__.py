"""Trainers' logs: parts, and a stream."""
