"""`samestep train`: a small GPT trained in any layout, with checkpoints and restarts.

A trainer to use, and to copy from. It needs torch alone.

    options.py   the flags
    corpus.py    bytes, and every sequence of a run by its number
    world.py     this process among the ranks: process group, device, sums
    layouts.py   the model and its optimizer, placed as asked
    trainer.py   the loop: step, evaluate, save, resume; the command
    journal.py   the log, the progress bar, the picture

The model, and how it is cut over ranks, is in `samestep/models/gpt.py`.
"""
