"""Parameters on XLA devices: where their state lies, and how the partitioner gets whole blocks."""
