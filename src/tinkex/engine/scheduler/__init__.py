"""What runs next: order within a run, fair shares between users, and passes that share one token budget.

Pure Python. Nothing here depends on what an operation computes, so a simulation can drive it.
"""

from tinkex.engine.scheduler.fairness import FairShare
from tinkex.engine.scheduler.queue import GapTimeout, Queue
from tinkex.engine.scheduler.rate_limit import TokenRate
from tinkex.engine.scheduler.sample_queue import SampleQueue
from tinkex.engine.scheduler.turn import Turn, next_turn

__all__ = ["FairShare", "GapTimeout", "Queue", "SampleQueue", "TokenRate", "Turn", "next_turn"]
