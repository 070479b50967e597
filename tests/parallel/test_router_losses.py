"""Losses of routers: the formulas, and meshes against one process."""
