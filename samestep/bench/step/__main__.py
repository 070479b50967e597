"""`python -m samestep.bench.step`: the command as a plain script, with torch alone."""

import sys

from samestep.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["bench", "step", *sys.argv[1:]]))
