"""Addresses and ports."""
