"""A receipt of `samestep stress` as one page that needs nothing but a browser."""

from samestep.lab.stress.report.page import render as render
