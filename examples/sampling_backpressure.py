"""Send more samples than a server accepts, and let the client handle the backpressure.

You will see twenty-four concurrent samples on a server with a queue limit of ten, how often the server rejected
requests and the client paused, and all samples finish; then the same with a client-side limit and no rejections.
The example starts its own server with a low limit, unless TINKER_BASE_URL is set.
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

LOW_LIMIT = ("--port", "0", "--max-pending-operations", "10")


class Pauses:
    """Records the client's pauses after rejections."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def emit(self, event) -> None:
        """Receives one event of the client."""
        if isinstance(event, SamplingPaused):
            self.seconds.append(event.after_s)


def main() -> None:
    with ExitStack() as stack:
        connection = {"base_url": os.environ.get("TINKER_BASE_URL")}
        if connection["base_url"] in {None, "", "local"}:
            command = [sys.executable, "-m", "tinkex", "--json", "serve", *LOW_LIMIT]
            server = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(server.terminate)
            ready = json.loads(server.stdout.readline())
            connection = {"base_url": ready["url"], "api_key": ready["api_key"]}
        for max_concurrent in (None, 8):
            pauses = Pauses()
            with tinkex.ServiceClient(**connection, events=pauses) as service:
                models = service.get_server_capabilities().supported_models
                model = os.environ.get("TINKER_BASE_MODEL") or models[0].model_name
                retry = tinkex.RetryConfig(max_connections=max_concurrent) if max_concurrent else None
                sampler = service.create_sampling_client(base_model=model, retry_config=retry)
                prompt = types.ModelInput.from_ints(sampler.get_tokenizer().encode("Queues are"))
                futures = [sampler.sample(prompt, 1, types.SamplingParams(max_tokens=16)) for _ in range(24)]
                finished = sum(len(future.result().sequences) for future in futures)
            limit = f"at most {max_concurrent} concurrently" if max_concurrent else "all concurrently"
            print(f"{limit}: {finished} of 24 finished, paused {len(pauses.seconds)} times", end="")
            print(f", longest pause {max(pauses.seconds):.2f} s" if pauses.seconds else "")


if __name__ == "__main__":
    main()
