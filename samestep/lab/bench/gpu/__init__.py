"""Measurements, options and reports that the GPU benchmarks share; they need torch alone."""
