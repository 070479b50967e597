"""`samestep train`: a small GPT trained in any layout, with checkpoints and restarts.

A trainer to use, and to copy from. It needs torch alone.

    options.py   the flags
    gpt.py       the model
    gpt_plan.py  how it is cut over ranks
    balance.py   experts that are chosen too often become less likely
    corpus.py    bytes, and every sequence of a run by its number
    world.py     this process among the ranks: process group, device, sums
    layouts.py   the model and its optimizer, placed as asked
    trainer.py   the loop: step, evaluate, save, resume
    journal.py   the log, the progress bar, the picture
    command.py   the command
"""
