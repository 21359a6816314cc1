"""Observe the queue states of waiting operations.

You will see two runs submit six training operations each without waiting for results, the queue states that the
server reports meanwhile, and all operations finish in order. The example starts its own server with short long
polls, unless TINKER_BASE_URL is set.
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

SHORT_POLLS = ("--port", "0", "--long-poll-s", "0.01")


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
        connection = {"base_url": os.environ.get("TINKER_BASE_URL")}
        if connection["base_url"] in {None, "", "local"}:
            command = [sys.executable, "-m", "tinkex", "--json", "serve", *SHORT_POLLS]
            server = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(server.terminate)
            ready = json.loads(server.stdout.readline())
            connection = {"base_url": ready["url"], "api_key": ready["api_key"]}
        observer = Observer()
        service = stack.enter_context(tinkex.ServiceClient(**connection, events=observer))
        models = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or models[0].model_name
        runs = [service.create_lora_training_client(model, rank=4, seed=seed) for seed in (0, 1)]
        calls: list[list[tuple]] = [[], []]
        for run, received in zip(runs, calls, strict=True):
            # The observer of a run receives the states of its operations only.
            run.queue_state_observer = lambda *state, received=received: received.append(state)
        tokens = runs[0].get_tokenizer().encode("Good things come to those who wait. ")
        datum = types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})

        futures = []
        for _ in range(3):
            for run in runs:
                futures.append(run.forward_backward([datum] * 8, "cross_entropy"))
                futures.append(run.optim_step(types.AdamParams(learning_rate=1e-3)))
        losses = [future.result().metrics["loss:sum"] for future in futures[::2]]
        for number, run in enumerate(runs):
            formatted = ", ".join(f"{loss / 8:.2f}" for loss in losses[number::2])
            print(f"{run.model_id[-7:]} finished with losses {formatted}")
        print("queue states:")
        for (kind, state, reason), count in sorted(observer.states.items()):
            print(f"  {count:2} × {kind} {state}: {reason}")
        for run, received in zip(runs, calls, strict=True):
            print(f"the observer of {run.model_id[-7:]} was called {len(received)} times")


if __name__ == "__main__":
    main()
