"""Watch how a server treats operations that wait in its queue.

You will see two runs send six training operations each without waiting for results, what the server says
about those in line, and all of them finish in order. For this the example starts a server of its own that
answers questions about waiting operations quickly; with TINKER_BASE_URL it uses that server instead.
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

CHATTY = ("--port", "0", "--long-poll-s", "0.01")


class Observer:
    """Counts what the server says about waiting operations; the default sink logs pauses as warnings."""

    def __init__(self) -> None:
        self.heard: Counter[tuple[str, str, str]] = Counter()

    def emit(self, event) -> None:
        """Takes one event of the client."""
        if isinstance(event, QueueStateChanged):
            self.heard[event.request_type, event.state, event.reason or "no reason given"] += 1


def main() -> None:
    with ExitStack() as stack:
        where = {"base_url": os.environ.get("TINKER_BASE_URL")}
        if where["base_url"] in {None, "", "local"}:
            command = [sys.executable, "-m", "tinkex", "--json", "serve", *CHATTY]
            server = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(server.terminate)
            ready = json.loads(server.stdout.readline())
            where = {"base_url": ready["url"], "api_key": ready["api_key"]}
        observer = Observer()
        service = stack.enter_context(tinkex.ServiceClient(**where, events=observer))
        offered = service.get_server_capabilities().supported_models
        model = os.environ.get("TINKER_BASE_MODEL") or offered[0].model_name
        runs = [service.create_lora_training_client(model, rank=4, seed=seed) for seed in (0, 1)]
        news: list[list[tuple]] = [[], []]
        for run, heard in zip(runs, news, strict=True):
            # A function for each run hears of its operations alone.
            run.queue_state_observer = lambda *state_and_reason, heard=heard: heard.append(state_and_reason)
        tokens = runs[0].get_tokenizer().encode("Good things come to those who wait. ")
        datum = types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})

        futures = []
        for _ in range(3):
            for run in runs:
                futures.append(run.forward_backward([datum] * 8, "cross_entropy"))
                futures.append(run.optim_step(types.AdamParams(learning_rate=1e-3)))
        losses = [future.result().metrics["loss:sum"] for future in futures[::2]]
        for number, run in enumerate(runs):
            shown = ", ".join(f"{loss / 8:.2f}" for loss in losses[number::2])
            print(f"{run.model_id[-7:]} finished with losses {shown}")
        print("meanwhile the server said:")
        for (kind, state, reason), count in sorted(observer.heard.items()):
            print(f"  {count:2} × {kind} {state}: {reason}")
        for run, heard in zip(runs, news, strict=True):
            print(f"the observer of {run.model_id[-7:]} was told {len(heard)} times")


if __name__ == "__main__":
    main()
