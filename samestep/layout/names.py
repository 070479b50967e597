"""Names of parameters, whatever has wrapped the modules that hold them."""

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # of torch.compile and of checkpointing


def without_wrappers(name: str) -> str:
    """A parameter's name without the parts that torch.compile and checkpointing put in."""
    return ".".join(part for part in name.split(".") if part not in ("", *WRAPPERS))
