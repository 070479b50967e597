"""From which size on is it faster to share a parameter's update between ranks?"""

from samestep.bench.crossover.receipt import read_crossover

__all__ = ["read_crossover"]
