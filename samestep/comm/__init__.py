"""Issue collectives: no other package of samestep does."""
