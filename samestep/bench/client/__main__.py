"""`python -m samestep.bench.client nanochat`: the commands as a plain script, with torch alone."""

import sys

from samestep.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["bench", "client", *sys.argv[1:]]))
