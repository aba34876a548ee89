"""Configs: validation, server policy, expected cost, presets and schema."""
