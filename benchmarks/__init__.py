"""Measurements, each of which prints a table and writes JSON."""
