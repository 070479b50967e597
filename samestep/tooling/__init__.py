"""Tools that commands share: flags, files, progress, warnings."""
