"""Rules of others, written with `samestep.Rule` alone: each is one file, and runs in every layout."""
