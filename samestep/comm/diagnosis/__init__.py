"""Collectives that fail or hang: the missing ranks, and the position of every rank."""
