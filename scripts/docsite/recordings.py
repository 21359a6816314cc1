"""Recordings for the figures: the scheduler and the sampler on a small case, step by step."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

USERS = ("ada", "bob", "cleo")
TOKEN_BUDGET = 2048
"""The default of ``max_tokens_per_pass``."""


def turns() -> list[dict[str, Any]]:
    """Records which operations share a pass: Ada sends a backlog, Bob trains in small steps, Cleo starts later."""
    from tinkex.engine.operation import Kind, Operation
    from tinkex.engine.scheduler import FairShare, Queue, next_turns

    queue = Queue(gap_timeout_s=300)
    numbers = dict.fromkeys(USERS, 0)
    for user in USERS:
        queue.open(user)

    def send(user: str, kind: Kind, num_tokens: int = 0) -> None:
        numbers[user] += 1
        name = f"{user}-{numbers[user]}"
        queue.put(Operation(name, user, "base", user, numbers[user], kind, num_tokens), now=0.0)

    for _ in range(14):
        send("ada", Kind.FORWARD_BACKWARD, 512)
    share = FairShare[str]()
    recorded: list[dict[str, Any]] = []
    while len(recorded) < 14:
        if len(recorded) in {1, 3, 5, 7, 9}:
            send("bob", Kind.FORWARD_BACKWARD, 384)
            send("bob", Kind.OPTIM_STEP)
        if len(recorded) == 4:
            for _ in range(3):
                send("cleo", Kind.FORWARD_BACKWARD, 1024)
        taken = next_turns(queue, share, TOKEN_BUDGET)
        if not taken:
            break
        recorded += [
            {"operations": [[one.owner, one.kind.value, one.num_tokens] for one in turn]} for turn in taken
        ]
    return recorded


def batching() -> list[dict[str, Any]]:
    """Records when each of nine requests arrives and samples its tokens, with four slots in the batch."""
    import numpy as np

    from tinkex.engine.model.loader import load_transformer
    from tinkex.engine.model.tokenizer import EngineTokenizer
    from tinkex.engine.sampler.job import SampleJob
    from tinkex.engine.sampler.sampler import Sampler
    from tinkex.testing.tiny_model import write_tiny_model
    from tinkex.types import SamplingParams

    arrivals = [(0, 9), (0, 14), (0, 5), (0, 18), (2, 7), (2, 11), (8, 4), (12, 8), (12, 6)]
    with tempfile.TemporaryDirectory() as scratch:
        directory = write_tiny_model(Path(scratch) / "tiny")
        sampler = Sampler(load_transformer(directory), EngineTokenizer(directory), max_batch=4)
        requests: list[dict[str, Any]] = [{"arrives": at, "sampled": []} for at, _ in arrivals]
        step = 0

        def record(continuation: Any) -> None:
            if continuation.tokens:
                requests[int(continuation.sequence_id)]["sampled"].append(step)

        while sampler.busy or any(request["arrives"] >= step for request in requests):
            for number, (at, length) in enumerate(arrivals):
                if at == step:
                    prompt = np.arange(5 + number, 13 + number, dtype=np.int32)
                    params = SamplingParams(max_tokens=length, stop=[], seed=number)
                    name = str(number)
                    sampler.add(SampleJob(name, None, prompt, 1, params, [name]))
                    sampler.watch(name, record)
            sampler.step()
            step += 1
    return requests
