"""What commands share: flags, files, progress, warnings."""
