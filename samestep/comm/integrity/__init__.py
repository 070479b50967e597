"""Checks that ranks hold the same values."""
