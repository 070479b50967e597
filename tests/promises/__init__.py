"""Promises of the documentation, tried in every layout and with every option that matters to them.

    python -m tests.promises            # tries all; writes out/promises.json
    python -m tests.promises --only Mistakes --layout "flat zero2"

A promise is a sentence and a function that does on a rank what the sentence is about: it breaks
a rule and hears the error or the warning, or trains and compares with one process. Gradients
are small multiples of 1/8, so that their sums, means and squares are exact in any order: wherever
something works, it has the bits of one process.

`layouts.py` has what promises are tried in, `trial.py` the model and its training, `claims.py` what
functions of promises say of results, `listed.py` the list, `of_*.py` the promises of each subject,
`trying.py` the ranks that try them.
"""
