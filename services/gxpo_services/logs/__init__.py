"""Trainers' logs: reading and streaming."""
