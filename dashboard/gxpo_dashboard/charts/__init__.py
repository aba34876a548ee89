"""Charts: records to Vega-Lite specifications. Pure."""
