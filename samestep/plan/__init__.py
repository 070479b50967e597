"""Plans of all decisions before the first step, as pure data: the same on every rank."""
