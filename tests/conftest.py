"""One thread per process: the tensors here are small, and ranks share the cores."""

import gc
import os
import random
import shutil
import signal
from collections import Counter, defaultdict
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")  # or each process leaves a file behind
# Where there is a GPU, any backward pass starts threads for it, and ranks that are forked later
# cannot have one. So it is hidden but for `make test-gpu`, which looks for it without CUDA.
if os.environ.get("SAMESTEP_GPU"):
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
else:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import torch
from hypothesis import settings

from samestep.comm.groups import registry
from tests import limits, quick_dtensors, quick_seeds
from tests.lanes import Lanes
from tests.large_pages import use_large_pages
from tests.left_behind import Belongings, adopt_orphans, own_temporary_folder
from tests.own_process import reports_of_child
from tests.ranks import prepare
from tests.rewritten import rewrite_once
from tests.soak import SOAK, leave_out_twins

gc.disable()  # until tests are collected: nearly all that is made until then stays
torch.set_num_threads(1)
# A job in the background ignores Ctrl-C, and so would all that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Time per example depends on the machine's load; `make soak` looks at many more examples.
settings.register_profile("test", deadline=None, max_examples=20, derandomize=True)
settings.register_profile("soak", deadline=None, max_examples=1000)
settings.load_profile("soak" if SOAK else "test")
if not SOAK and not os.environ.get("SAMESTEP_GPU"):
    quick_dtensors.install()
    quick_seeds.install()

adopt_orphans()
if torch.__version__.startswith("2.9."):  # it makes a folder for good when it is imported
    import torch.distributed.nn.jit.instantiator
TEMPORARY = own_temporary_folder()
ROOT = Path(__file__).parent.parent
# What tools of ours leave in the checkout on purpose.
KEPT = {".pytest_cache", ".hypothesis", ".ruff_cache", ".mypy_cache", "out", "build"}


def pytest_addoption(parser):
    parser.addoption(
        "--lanes", type=int, metavar="N", help="so many tests at a time, in forked processes"
    )
    parser.addoption(
        "--shuffle", type=int, metavar="SEED", help="run files, and tests in them, in random order"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """A test that hangs is ended, later on a slow machine."""
    if config.getoption("timeout", None) is None:
        config.option.timeout = limits.TEST
    if SOAK or os.environ.get("SAMESTEP_COMPARE_PLANS"):
        from tests.inside.plan.compared import watch_plans

        watch_plans()


def pytest_report_header(config):
    order = config.getoption("shuffle")
    order = "as written" if order is None else f"--shuffle {order}"
    return f"limits are times {limits.SLOWNESS:g}, as measured; order: {order}"


def pytest_collection_modifyitems(config, items):
    """Files stay together, since their tests share what takes time to set up."""
    leave_out_twins(items)
    seed = config.getoption("shuffle")
    if seed is None:
        return
    files = defaultdict(list)
    for item in sorted(items, key=lambda item: item.nodeid):
        files[item.path].append(item)
    chance = random.Random(seed)
    order = list(files)
    chance.shuffle(order)
    for path in order:
        chance.shuffle(files[path])
    items[:] = [item for path in order for item in files[path]]


def in_checkout():
    return {path.name for path in ROOT.iterdir() if not path.name.startswith(".coverage")}


def pytest_sessionstart(session):
    session.in_checkout = in_checkout()
    config = session.config
    lanes = config.getoption("lanes")
    if lanes or hasattr(config, "workerinput"):
        prepare()
    if lanes or config.getoption("numprocesses", None):
        rewrite_once(config)
    if lanes and (reporter := config.pluginmanager.getplugin("terminalreporter")):
        reporter.showfspath = False  # tests of several files end between each other


def pytest_collection_finish(session):
    """All that is there now stays: no collection of garbage looks at it, and forks copy it soon."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000)  # as in ranks: steps make many objects that live
    if not session.config.getoption("lanes"):  # which have pages of their own
        use_large_pages()


def begin_lane():
    """Give a lane what a process of tests has; what to do when it ends."""
    global TEMPORARY
    adopt_orphans()
    TEMPORARY = own_temporary_folder()
    use_large_pages()
    return lambda: shutil.rmtree(TEMPORARY, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """With `--lanes`, tests are run in other processes, and told here."""
    count = session.config.getoption("lanes")
    if not count or session.testsfailed or session.config.option.collectonly:
        return None  # pytest says what could not be collected
    Lanes(session, count, begin_lane).run()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    """Nothing new lies in the checkout; temporary files are gone with their folder."""
    shutil.rmtree(TEMPORARY, ignore_errors=True)
    if hasattr(session.config, "workerinput"):
        return  # told by the process that has started the workers
    new = in_checkout() - session.in_checkout - KEPT
    if new:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        session.config.left_in_checkout = sorted(new)


def pytest_terminal_summary(terminalreporter, config):
    """Which files take the time."""
    left = getattr(config, "left_in_checkout", None)
    if left:
        terminalreporter.write_line(f"ERROR: tests have left in the checkout: {left}", red=True)
    seconds, tests = Counter(), Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                file = report.nodeid.partition("::")[0]
                seconds[file] += report.duration
                tests[file] += report.when == "call"
    if sum(seconds.values()) < 60:
        return
    total = sum(seconds.values())
    terminalreporter.section(f"{total:.0f} s in tests, most of it in")
    for file, spent in seconds.most_common(15):
        terminalreporter.write_line(
            f"{spent:7.1f} s {100 * spent / total:4.1f}% {tests[file]:5} tests  {file}"
        )


def pytest_runtest_setup(item):
    """Say how tests that need a GPU or XLA are run."""
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a GPU, and is run by `make test-gpu`")
    if item.get_closest_marker("xla") is not None and find_spec("torch_xla") is None:
        pytest.skip("needs torch_xla, and is run by `make test-xla`")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    """Run a test that is marked `own_process` in a child: what it does to CUDA ends with it."""
    if item.get_closest_marker("own_process") is None or not torch.cuda.is_available():
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in reports_of_child(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.fixture(scope="module")
def no_torchrun():
    """Commands start ranks of their own."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request):
    """Whoever leaves something behind fails, not the test that is disturbed by it.

    Nor does a group outlive its test: ranks are forked from here, and a child cannot end a gloo
    group of its parent. What has a process of its own leaves nothing: that process ends.
    """
    if request.node.get_closest_marker("own_process") is not None:
        yield
        return
    before = Belongings(TEMPORARY)
    yield
    registry.forget()
    left = before.left_behind()
    if left:
        pytest.fail("left behind: " + "; ".join(left), pytrace=False)
