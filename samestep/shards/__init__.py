"""Where parameters live, and how their gradients and blocks come together there."""
