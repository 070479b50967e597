"""Run one test in a child process. Pytest has no public name for running a test."""

import multiprocessing
import os

import pytest
from _pytest.runner import runtestprotocol

from tests.limits import HANG


def reports_of_child(item):
    """What pytest reports of a test, fixtures included, that ran in a child of this process."""
    hook, config = item.config.hook, item.config

    def run():
        reports = runtestprotocol(item, log=False)
        told = [hook.pytest_report_to_serializable(config=config, report=r) for r in reports]
        theirs.send(told)
        theirs.close()
        os._exit(0)

    fork = multiprocessing.get_context("fork")
    mine, theirs = fork.Pipe(duplex=False)
    child = fork.Process(target=run)
    child.start()
    theirs.close()
    try:
        told = mine.recv() if mine.poll(HANG) else None
    except EOFError:
        told = None
    child.kill()
    child.join()
    if told is not None:
        return [hook.pytest_report_from_serializable(config=config, data=one) for one in told]
    why = f"its process said nothing in {HANG:.0f} s, or died"
    return [pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")]
