"""Parameters in flight and threads."""

from __future__ import annotations

import sys
import threading

from samestep.shards.replicated.awaited import ParametersInFlight, wait_for_anyone


def test_optimizers_are_made_in_several_threads_at_once():
    """One looks through all that have parameters in flight while another comes and goes."""
    ended = threading.Event()

    def come_and_go():
        while not ended.is_set():
            _ = [ParametersInFlight() for _ in range(20)]

    other = threading.Thread(target=come_and_go)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    other.start()
    try:
        for _ in range(5000):
            wait_for_anyone([])
    finally:
        ended.set()
        other.join()
        sys.setswitchinterval(interval)
