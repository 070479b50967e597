"""Rules of others, written with `samestep.Rule`: one file each, that runs in every layout."""
