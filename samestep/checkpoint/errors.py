"""What is wrong with a checkpoint."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names the file and the way out."""
