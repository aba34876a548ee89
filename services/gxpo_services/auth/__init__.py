"""Access tokens: created, listed and revoked."""
