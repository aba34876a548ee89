"""Cannot be imported."""

raise RuntimeError("no licence on this machine")
