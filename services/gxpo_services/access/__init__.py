"""Who may do what: roles, secrets, and the holder of a token."""
