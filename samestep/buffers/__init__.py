"""Buckets at work: gradients packed, reduced and kept as shards."""
