"""What runs leave: metrics, samples, events, logs, timeline, checkpoints and files."""
