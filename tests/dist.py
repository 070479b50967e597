"""Builds the sdist, and from it the wheel: `make dist`, and what the tests of them install.

    python -m tests.dist --out dist

A release is built from a commit whose tag is the version: v0.1.0. The version itself stands in
samestep/version.py alone; a tag that says something else is refused, and so are files that were
changed since the commit.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from samestep.version import __version__

ROOT = Path(__file__).parent.parent
SOURCES = ("samestep", "pyproject.toml", "README.md", "LICENSE")
BUILD = "import setuptools.build_meta as b, sys; print(getattr(b, sys.argv[1])(sys.argv[2]))"
PATIENCE = 300.0


def build(out: Path, scratch: Path, sources: Path = ROOT) -> tuple[Path, Path]:
    """The sdist of the sources, and the wheel that it builds; the checkout stays as it is.

    With the setuptools of this environment: nothing is downloaded.
    """
    copied = scratch / "sources"
    for name in SOURCES:
        to = copied / name
        if (sources / name).is_dir():
            shutil.copytree(sources / name, to, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(sources / name, to)
    out.mkdir(parents=True, exist_ok=True)
    sdist = run_backend("build_sdist", copied, out)
    with tarfile.open(sdist) as archive:
        archive.extractall(scratch / "unpacked", filter="data")
    (unpacked,) = (scratch / "unpacked").iterdir()
    return sdist, run_backend("build_wheel", unpacked, out)


def run_backend(hook: str, sources: Path, out: Path) -> Path:
    """What pip would call, in a process of its own."""
    command = [sys.executable, "-c", BUILD, hook, str(out.resolve())]
    done = subprocess.run(command, cwd=sources, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode != 0:
        raise RuntimeError(f"{hook} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return out / done.stdout.strip().splitlines()[-1]


def wrong_tags(tags: list[str], version: str) -> list[str]:
    """Tags of a commit that name another version than its files do."""
    versions = [tag for tag in tags if tag.startswith("v") and tag[1:2].isdigit()]
    return [tag for tag in versions if tag != f"v{version}"]


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split("\n")[:-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    out = parser.parse_args().out
    changed = _git("status", "--porcelain", "--", *SOURCES)
    if changed:
        return _say(1, f"error: not as committed: commit it first, or put it away: {changed}")
    tags = _git("tag", "--points-at", "HEAD")
    wrong = wrong_tags(tags, __version__)
    if wrong:
        return _say(1, f"error: samestep/version.py says {__version__}, and the tag {wrong[0]}")
    scratch = out / ".scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        for path in build(out, scratch):
            _say(0, f"{path}  {path.stat().st_size:,} bytes")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if f"v{__version__}" not in tags:
        _say(0, f"not a release: the commit has no tag v{__version__} (docs/dev/releasing.md)")
    return 0


def _say(status: int, text: str) -> int:
    sys.stdout.write(f"{text}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
