"""Has a process of this machine ended?"""

from __future__ import annotations

import os
import signal
import time

import pytest

from samestep.comm.diagnosis.roll_call import has_ended, this_process


def test_this_process_has_not_ended():
    assert not has_ended(this_process())


@pytest.mark.parametrize("reaped", [False, True])
def test_a_killed_process_has_ended_also_as_a_zombie(reaped):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, this_process().encode())
        time.sleep(60)
        os._exit(0)
    name = os.read(read, 1000).decode()
    try:
        assert not has_ended(name)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        if reaped:
            os.waitpid(pid, 0)
    assert has_ended(name)
    if not reaped:
        os.waitpid(pid, 0)


def test_a_number_that_was_given_again_is_another_process():
    machine, pid, start = this_process().rsplit(" ", 2)
    assert has_ended(f"{machine} {pid} {int(start) - 1}")


def test_nothing_is_known_of_other_machines():
    _, pid, start = this_process().rsplit(" ", 2)
    assert not has_ended(f"another pid:[1] {pid} {int(start) - 1}")
