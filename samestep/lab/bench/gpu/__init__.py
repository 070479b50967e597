"""What the benchmarks of a GPU share; all of it needs torch alone."""
