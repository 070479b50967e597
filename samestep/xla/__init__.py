"""Parameters on XLA devices: sharding of their state, and whole blocks for the partitioner."""
