"""Send more samples than a server accepts, and let the client handle the backpressure.

You will see twenty-four concurrent samples on a server with a queue limit of ten: how often the server rejected one
and why, how long the client paused, and all samples finish; then the same with a client-side limit and no rejections.
On a mock server you will see the byte penalty: after a rejection each prompt counts twenty times its bytes, so that
fewer are submitted simultaneously, and a large prompt pauses longer than a small one.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import tinkex
from tinkex import types
from tinkex.observability.events import SamplingPaused
from tinkex.testing import MockTransport, reply, sample_reply

LOW_LIMIT = ("--port", "0", "--max-pending-operations", "10")
REPLIES = {  # of the mock server, which accepts 100 kB of prompts at a time
    "client/config": {"sample_dispatch_bytes_semaphore_size": 100_000},
    "create_session": {"session_id": "mock"},
    "create_sampling_session": {"sampling_session_id": "mock:sample:0"},
}


class Pauses(list):
    """Records the client's pauses after rejections."""

    def emit(self, event) -> None:
        """Receives one event of the client."""
        if isinstance(event, SamplingPaused):
            self.append(event)


def sample_all(prompt: types.ModelInput | None, count: int, limit: int | None, **connection) -> Pauses:
    """Samples concurrently and returns the pauses."""
    pauses = Pauses()
    with tinkex.ServiceClient(**connection, events=pauses) as service:
        model = "mock" if prompt else os.environ.get("TINKER_BASE_MODEL")
        model = model or service.get_server_capabilities().model_names()[0]
        retry = tinkex.RetryConfig(max_connections=limit) if limit else None
        sampler = service.create_sampling_client(base_model=model, retry_config=retry)
        prompt = prompt or types.ModelInput.from_text("Queues are", sampler)
        futures = [sampler.sample(prompt, 1, types.SamplingParams(max_tokens=16)) for _ in range(count)]
        finished = sum(len(future.result().sequences) for future in futures)
    print(f"{finished} of {count} finished, paused {len(pauses)} times")
    return pauses


def mock(num_tokens: int, rejects: int) -> None:
    """Samples prompts of so many tokens on a mock server, which rejects the first submissions."""
    now, peak, left = 0, 0, rejects

    async def handle(request):
        nonlocal now, peak, left
        path = request.path.removeprefix("/api/v1/")
        if path != "asample":
            return sample_reply([1]) if path == "retrieve_future" else reply(REPLIES.get(path, {}))
        if left:
            left -= 1
            return reply({"queue_state_reason": "too many prompts"}, status=429)
        now, peak = now + 1, max(peak, now + 1)
        await asyncio.sleep(0.25)
        now -= 1
        return reply({"request_id": "r", "sample_sequence_ids": ["s"]})

    prompt = types.ModelInput.from_ints([1] * num_tokens)
    print(f"a mock server, prompts of {num_tokens} tokens: ", end="")
    pauses = sample_all(prompt, 12 if num_tokens < 10_000 else 1, None, transport=MockTransport(handle))
    for pause in pauses[:1]:
        print(f"  paused {pause.after_s:.0f} s for {pause.prompt_bytes} bytes: {pause.reason}")
    print(f"  at most {peak} submitted simultaneously")


def main() -> None:
    command = [sys.executable, "-m", "tinkex", "--json", "serve", *LOW_LIMIT]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        ready = json.loads(server.stdout.readline())
        connection = {"base_url": ready["url"], "api_key": ready["api_key"]}
        print("all concurrently: ", end="")
        pauses = sample_all(None, 24, None, **connection)
        print(f"  longest pause {max(p.after_s for p in pauses):.2f} s; reason: {pauses[0].reason}")
        print("at most 8 concurrently: ", end="")
        sample_all(None, 24, 8, **connection)
        server.terminate()
    mock(400, rejects=0)
    mock(400, rejects=1)
    mock(14_000, rejects=1)


if __name__ == "__main__":
    main()
