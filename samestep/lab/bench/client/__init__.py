"""Somebody else's model, trained with its own optimizer and with ours."""
