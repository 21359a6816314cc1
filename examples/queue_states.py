"""Observe the queue states of waiting operations, with the server's reasons.

You will see eight samples on a server that computes one sample at a time: the paused state of those that wait, with
the server's reason; the observer of one call, which receives the states of that call only; and two runs whose
training operations wait in line and finish in order. The example starts its own server with short long polls.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack

import tinkex
from tinkex import types
from tinkex.observability.events import QueueStateChanged

ONE_AT_A_TIME = ("--port", "0", "--long-poll-s", "0.01", "--max-decode-batch", "1")


class Observer:
    """Counts queue states; the default sink logs pauses as warnings."""

    def __init__(self) -> None:
        self.states: Counter[tuple[str, str, str]] = Counter()

    def emit(self, event) -> None:
        """Receives one event of the client."""
        if isinstance(event, QueueStateChanged):
            self.states[event.request_type, event.state, event.reason or "no reason given"] += 1


def main() -> None:
    with ExitStack() as stack:
        command = [sys.executable, "-m", "tinkex", "--json", "serve", *ONE_AT_A_TIME]
        server = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
        stack.callback(server.terminate)
        ready = json.loads(server.stdout.readline())
        observer = Observer()
        service = stack.enter_context(
            tinkex.ServiceClient(base_url=ready["url"], api_key=ready["api_key"], events=observer)
        )
        model = os.environ.get("TINKER_BASE_MODEL") or service.get_server_capabilities().model_names()[0]
        sampler = service.create_sampling_client(base_model=model)
        prompt = types.ModelInput.from_text("Good things come to those who wait. ", sampler)
        params = types.SamplingParams(max_tokens=64, stop=[])
        states: list[list[tuple[str, str | None]]] = [[] for _ in range(8)]
        samples = [
            sampler.sample(prompt, 1, params, queue_state_observer=lambda *state, to=one: to.append(state))
            for one in states
        ]
        print(f"{sum(len(future.result().sequences) for future in samples)} samples finished")
        for state, reason in states[-1]:
            print(f"  the last of them was {state}: {reason}")

        runs = [service.create_lora_training_client(model, rank=4, seed=seed) for seed in (0, 1)]
        calls: list[list[tuple]] = [[], []]
        for run, received in zip(runs, calls, strict=True):
            # The observer of a run receives the states of its operations only.
            run.queue_state_observer = lambda *state, received=received: received.append(state)
        tokens = prompt.to_ints()
        datum = types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
        passes = []
        for _ in range(3):
            for run in runs:
                passes.append(run.forward_backward([datum] * 8, "cross_entropy"))
                run.optim_step(types.AdamParams(learning_rate=1e-3))
        losses = [future.result().loss for future in passes]
        for number, (run, received) in enumerate(zip(runs, calls, strict=True)):
            shown = ", ".join(f"{loss / 8:.2f}" for loss in losses[number::2])
            print(f"{run.model_id[-7:]} finished with losses {shown}; its observer: {len(received)} states")
        print(
            f"observers of single samples: {sum(map(len, states))} states, at most {max(map(len, states))} each"
        )
        print("queue states:")
        for (kind, state, reason), count in sorted(observer.states.items()):
            print(f"  {count:2} × {kind} {state}: {reason}")


if __name__ == "__main__":
    main()
