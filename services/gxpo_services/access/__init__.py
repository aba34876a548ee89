"""Authentication and authorization: roles, secrets and principals."""
