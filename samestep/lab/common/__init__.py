"""Code that stress, estimate and bench share; none of the three imports another."""
