"""Labels and messages. Pure."""
