"""Parts that the benchmarks of a GPU share; all of them need torch alone."""
