"""What runs next: order within a run, fair turns between users, and passes that share one token budget.

Pure Python. Nothing here knows what an operation computes; the engine core hands in work and takes plans out.
"""

from tinkex.engine.scheduler.fairness import FairShare
from tinkex.engine.scheduler.pace import Pace
from tinkex.engine.scheduler.plan import Barrier, Pass, Plan, next_plan
from tinkex.engine.scheduler.queue import Missed, Queue
from tinkex.engine.scheduler.samples import SampleQueue
from tinkex.engine.scheduler.work import Kind, Work

__all__ = [
    "Barrier",
    "FairShare",
    "Kind",
    "Missed",
    "Pace",
    "Pass",
    "Plan",
    "Queue",
    "SampleQueue",
    "Work",
    "next_plan",
]
