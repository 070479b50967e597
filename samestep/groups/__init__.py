"""Parameter groups: the rule of each parameter, and the options users choose."""
