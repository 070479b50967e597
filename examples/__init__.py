"""Runnable examples; `make demo` starts one of them."""
