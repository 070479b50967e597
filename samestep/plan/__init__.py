"""All that is decided before the first step, as pure data: the same on every rank."""
