"""What commands share: bad requests, ranks that were asked for, progress, result files."""
