"""The GPT that commands train, its plan over a mesh, and shapes of other models' parameters."""
