"""`python -m samestep` is the command `samestep`."""

import sys

from samestep.cli import main

if __name__ == "__main__":
    sys.exit(main())
