"""The one GPT, how it is cut over a mesh, and the shapes that commands share."""
