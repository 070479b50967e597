"""`python -m samestep.lab.bench.client nanochat`: commands as a plain script, with torch alone."""

import sys

from samestep.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["bench", "client", *sys.argv[1:]]))
