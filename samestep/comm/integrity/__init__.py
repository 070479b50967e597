"""Whether ranks hold the same."""
