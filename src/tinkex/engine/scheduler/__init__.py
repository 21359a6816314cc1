"""What runs next: order within a run, fair shares between users, and passes that share one token budget.

Nothing here computes with weights, so a simulation can drive it.
"""

from tinkex.engine.scheduler.crash_backoff import CrashBackoff
from tinkex.engine.scheduler.fairness import FairShare
from tinkex.engine.scheduler.loss_costs import LossCosts
from tinkex.engine.scheduler.queue import GapTimeout, Queue
from tinkex.engine.scheduler.rate_limit import TokenRate
from tinkex.engine.scheduler.run_limits import NO_LIMITS, RunLimits
from tinkex.engine.scheduler.sample_queue import SampleQueue
from tinkex.engine.scheduler.sample_router import SampleRouter
from tinkex.engine.scheduler.sampler_scaling import Demand, SamplerScaling
from tinkex.engine.scheduler.turn import MayRun, Turn, always, next_turns

__all__ = [
    "NO_LIMITS",
    "CrashBackoff",
    "Demand",
    "FairShare",
    "GapTimeout",
    "LossCosts",
    "MayRun",
    "Queue",
    "RunLimits",
    "SampleQueue",
    "SampleRouter",
    "SamplerScaling",
    "TokenRate",
    "Turn",
    "always",
    "next_turns",
]
