"""Train a small GPT in any layout, with checkpoints, restarts and a log.

    python examples/train_gpt.py --steps 300
    torchrun --nproc-per-node 2 examples/train_gpt.py --layout fsdp2
    torchrun --nproc-per-node 8 examples/train_gpt.py --tp 2 --sp --ep 2 --moe

The same as `samestep train`, whose code is in samestep/train/, where each part can be copied from:
trainer.py is the loop. docs/cli.md has the flags.
"""

import sys

from samestep.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
