"""The five views."""
