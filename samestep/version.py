"""The version of the package, and the versions of Python and torch that it supports."""

__version__ = "0.1.0"

PYTHON = ((3, 11), (3, 14))  # oldest and newest that the tests run with
TORCH = ((2, 9), (2, 13))
