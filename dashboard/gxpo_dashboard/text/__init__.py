"""Labels and formats of numbers and times. Pure."""
