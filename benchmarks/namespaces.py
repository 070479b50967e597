"""Network namespaces as hosts of one machine, or as ranks with a network card of their own.

Needs Linux and root (`ip netns`, `unshare`; `tc` for cards that are slow).
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from samestep.tooling.request import BadRequestError

HOSTS = ("samestep-north", "samestep-south")  # what they are called, where a host is one card
PORT = 29577
CARD = "card"  # the network card of a rank, or of a host
PACKET = 9000  # bytes of a packet between cards, as clusters have them
SLOW = "1:20"  # the class of what goes to other hosts


def refused() -> str | None:
    """Why there can be no hosts of our own here, if so."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    probe = "samestep-probe"
    try:
        made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    except FileNotFoundError:
        return "there is no command `ip`"
    if made.returncode:
        return f"`ip netns add` says: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


def require_hosts() -> None:
    reason = refused()
    if reason is not None:
        raise BadRequestError(f"two hosts cannot be made here: {reason}")


def cut_the_link() -> None:
    """Of the second host: from now on nothing arrives, and nobody is told."""
    _run("ip", "-n", "card_1", "link", "set", CARD, "down")


def torchrun(
    words: Sequence[str], number: int, hosts: int, ranks: int, log: Path, **environment: str
) -> subprocess.Popen[bytes]:
    """Start `python -m torch.distributed.run ... words` on a host of one card."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", str(hosts),
        "--node-rank", str(number), "--nproc-per-node", str(ranks),
        "--master-addr", card_address(0, 1), "--master-port", str(PORT), *words,
    ]  # fmt: skip
    named = ["unshare", "--uts", "sh", "-c", f'hostname {HOSTS[number]}; exec "$@"', "sh"]
    return _start(number, [*named, *command], log, environment)


@contextmanager
def cards(hosts: int, per_host: int = 1, pace: float | None = None) -> Iterator[None]:
    """A namespace for each rank, or for a whole host: `card_0` and so on; gone afterwards.

    What goes to, or comes from, a card of another host passes at `pace` bytes per second, if that
    is given, in each direction of each card; inside a host nothing holds it up.
    """
    names = ["card_switch", *(f"card_{rank}" for rank in range(hosts * per_host))]
    _forget(names)
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", names[0], "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", names[0], "link", "set", "switch", "mtu", str(PACKET), "up")
        for rank, name in enumerate(names[1:]):
            port = f"port_{rank}"
            at = "netns", names[0], "type", "veth", "peer", "name", CARD, "netns", name
            _run("ip", "link", "add", port, *at)
            _run("ip", "-n", names[0], "link", "set", port, "master", "switch")
            _run("ip", "-n", name, "addr", "add", f"{card_address(rank, per_host)}/16", "dev", CARD)
            for where, end, side in ((names[0], port, "src"), (name, CARD, "dst")):
                _run("ip", "-n", where, "link", "set", end, "mtu", str(PACKET), "up")
                others = [host for host in range(hosts) if host != rank // per_host]
                matches = [f"ip {side} 10.78.{host}.0/24" for host in others]
                if pace is not None:
                    _slow_down(where, end, pace, matches)
        yield
    finally:
        _forget(names)


def card_address(rank: int, per_host: int) -> str:
    """Ranks of a host have neighbouring ones."""
    host, place = divmod(rank, per_host)
    return f"10.78.{host}.{place + 1}"


def start_on_card(
    words: Sequence[str], rank: int, hosts: int, per_host: int, log: Path, **environment: str
) -> subprocess.Popen[bytes]:
    """Start `python words` as a rank of gloo."""
    usual = {
        "RANK": str(rank),
        "WORLD_SIZE": str(hosts * per_host),
        "LOCAL_RANK": str(rank % per_host),
        "LOCAL_WORLD_SIZE": str(per_host),
        "MASTER_ADDR": card_address(0, per_host),
        "MASTER_PORT": str(PORT),
    }
    return _start(rank, [sys.executable, *words], log, {**usual, **environment})


def _start(
    card: int, words: Sequence[str], log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """In a session of its own."""
    usual = {"GLOO_SOCKET_IFNAME": CARD, "OMP_NUM_THREADS": "1", "ONEDNN_JIT_PROFILE": "0"}
    return subprocess.Popen(
        ["ip", "netns", "exec", f"card_{card}", *words],
        env={**os.environ, **usual, **environment},
        stdout=log.open("w"),  # a pipe may fill up
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def end(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Them and all that they have started."""
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def bytes_to_other_hosts() -> int:
    """Sent by this rank's card since it is there, headers included."""
    told = subprocess.run(
        ["tc", "-s", "class", "show", "dev", CARD], check=True, capture_output=True, text=True
    ).stdout
    found = re.search(rf"class htb {SLOW} .*\n Sent (\d+) bytes", told)
    assert found is not None, told
    return int(found[1])


def _slow_down(where: str, end: str, pace: float, matches: Sequence[str]) -> None:
    """What matches leaves an end of a link at this pace, all else as it comes."""
    at = "dev", end
    _run("tc", "-n", where, "qdisc", "add", *at, "root", "handle", "1:", "htb", "default", "10")
    for handle, rate in (("1:10", "100gbit"), (SLOW, f"{8 * pace:.0f}bit")):
        added = "parent", "1:", "classid", handle, "htb", "rate", rate
        _run("tc", "-n", where, "class", "add", *at, *added, "burst", "64kb", "cburst", "64kb")
    for match in matches:
        found = "protocol", "ip", "parent", "1:", "prio", "1", "u32", "match", *match.split()
        _run("tc", "-n", where, "filter", "add", *at, *found, "flowid", SLOW)


def _forget(names: Sequence[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
