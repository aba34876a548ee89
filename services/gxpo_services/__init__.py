"""gxpo's job service: accepts, schedules, stores and serves runs. Knows the trainer's config and comparison only."""
