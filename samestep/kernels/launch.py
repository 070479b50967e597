"""Launches of kernels, and their compilation ahead of time in parallel threads.

A kernel takes a second to compile, and a step has some thirty. Most of that is in the compiler of
the device and in that of C, outside of Python: threads share it.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import triton

MOST_THREADS = 32
QUIET = 3.0  # seconds without a word

_log = logging.getLogger("samestep")
_compiling: ContextVar[bool] = ContextVar("compiling", default=False)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel; inside `compile_ahead` only compile it."""
    if _compiling.get():
        kernel.warmup(*args, grid=grid, **options)
    else:
        kernel[grid](*args, **options)


def is_compiling() -> bool:
    """Whether kernels are only compiled now, so that no CUDA graph can be recorded."""
    return _compiling.get()


def compile_ahead(function: Callable[[], object], device: torch.device) -> None:
    """Compile all kernels that a function would launch, without launching any.

    The function runs, and its results are invalid. A kernel that cannot be compiled or loaded
    is skipped here: its launch will raise the error.
    """
    with (
        _Compilers(device) as compilers,
        triton.AsyncCompileMode(compilers, ignore_errors=True),
        _only_compiling(),
    ):
        function()


@contextmanager
def _only_compiling() -> Iterator[None]:
    token = _compiling.set(True)
    try:
        yield
    finally:
        _compiling.reset(token)


class _Compilers(ThreadPoolExecutor):
    """Threads that compile kernels and their launchers, and load them onto a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asked = self._done = 0
        super().__init__(min(MOST_THREADS, 2 * (os.cpu_count() or 1)), "samestep-compile")

    def submit(self, compile_: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        self._asked += 1
        return super().submit(self._compile, compile_)

    def _compile(self, compile_: Callable[[], Any]) -> Any:
        kernel = compile_()
        on_gpu = self._device.type == "cuda"
        with torch.cuda.device(self._device) if on_gpu else nullcontext():
            kernel.run  # noqa: B018 - made when it is read: Triton has C code compiled for it
        self._done += 1
        return kernel

    def __enter__(self) -> "_Compilers":
        self._timer = threading.Timer(QUIET, self._tell)
        self._timer.daemon = True
        self._timer.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        self._timer.cancel()
        return super().__exit__(*error)

    def _tell(self) -> None:
        if self._asked and os.environ.get("LOCAL_RANK", "0") == "0":
            _log.warning(
                "compiling kernels for the first step: %d of %d so far are ready; Triton keeps "
                "them for the next time",
                self._done,
                self._asked,
            )
