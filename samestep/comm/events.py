"""Whether a GPU has got somewhere, asked without waiting for it."""

import torch


def recorded_event(device: torch.device) -> torch.cuda.Event | None:
    """Passes when the present stream has done what it was told so far; None on the host."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def has_passed(event: torch.cuda.Event) -> bool:
    """Whether the stream has come to it; never, if the GPU has failed."""
    try:
        return bool(event.query())  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
