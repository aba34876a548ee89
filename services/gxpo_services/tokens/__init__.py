"""Access tokens: creation, listing and revocation."""
