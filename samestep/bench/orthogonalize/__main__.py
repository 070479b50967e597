"""`python -m samestep.bench.orthogonalize`: the command as a plain script, with torch alone."""

import sys

from samestep.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["bench", "orthogonalize", *sys.argv[1:]]))
