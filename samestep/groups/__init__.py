"""What the user asked for: which rule each parameter follows, with which options."""
