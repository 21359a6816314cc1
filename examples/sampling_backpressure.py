"""Send more samples than a server takes, and let the client pace itself.

You will see twenty-four samples sent at once to a server that lets ten wait, how often the client was pushed back
and paused, and all of them finish; then the same with a bound of your own, and no push-back. For this the example
starts a server of its own with tight settings; with TINKER_BASE_URL it uses that server instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack

import tinkex
from tinkex import types
from tinkex.observability.events import SamplingPaused

TIGHT = ("--port", "0", "--max-pending-operations", "10")


class Pauses:
    """Remembers how long the client paused, each time the server pushed back."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def emit(self, event) -> None:
        """Takes one event of the client."""
        if isinstance(event, SamplingPaused):
            self.seconds.append(event.after_s)


def main() -> None:
    with ExitStack() as stack:
        where = {"base_url": os.environ.get("TINKER_BASE_URL")}
        if where["base_url"] in {None, "", "local"}:
            command = [sys.executable, "-m", "tinkex", "--json", "serve", *TIGHT]
            server = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(server.terminate)
            ready = json.loads(server.stdout.readline())
            where = {"base_url": ready["url"], "api_key": ready["api_key"]}
        for bound in (None, 8):
            pauses = Pauses()
            with tinkex.ServiceClient(**where, events=pauses) as service:
                offered = service.get_server_capabilities().supported_models
                model = os.environ.get("TINKER_BASE_MODEL") or offered[0].model_name
                retry = tinkex.RetryConfig(max_connections=bound) if bound else None
                sampler = service.create_sampling_client(base_model=model, retry_config=retry)
                prompt = types.ModelInput.from_ints(sampler.get_tokenizer().encode("Queues are"))
                futures = [sampler.sample(prompt, 1, types.SamplingParams(max_tokens=16)) for _ in range(24)]
                finished = sum(len(future.result().sequences) for future in futures)
            limit = f"at most {bound} under way" if bound else "all at once"
            print(f"{limit}: {finished} of 24 finished, pushed back {len(pauses.seconds)} times", end="")
            print(f", longest pause {max(pauses.seconds):.2f} s" if pauses.seconds else "")


if __name__ == "__main__":
    main()
