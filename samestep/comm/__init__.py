"""The only place that issues a collective."""
