"""Collectives that fail or hang: who is missing, and where everybody is."""
