"""The user's wishes: the rule of each parameter, and its options."""
