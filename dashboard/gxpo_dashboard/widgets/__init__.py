"""Elements that several views show."""
