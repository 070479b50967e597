"""What the benchmarks of a GPU share.

    options     reading the words of a command, and refusing what cannot run here
    timing      milliseconds by CUDA events, and their spread
    ceilings    what this device reaches in a large product and a large copy
    floors      FLOPs and bytes that a step cannot do without
    peers       other people's packages, from checkouts
    accuracy    how orthogonal a result is, and how far from the exact polynomial
    kernels     our kernels switched off, to measure their twins in plain torch
    show, picture, receipt    what is left on the screen and on disk

All of it needs torch alone; rich and matplotlib are used where they are installed.
"""
