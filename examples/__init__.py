"""Runnable examples; `make train` starts one of them."""
