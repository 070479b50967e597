"""Parameters that every rank holds whole: buckets, buffers, and who owns what."""
