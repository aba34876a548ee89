"""From a request to a checked config: policy of this server, expected cost, presets and schema."""
