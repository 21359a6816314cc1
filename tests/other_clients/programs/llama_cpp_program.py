"""Greedy samples by llama.cpp: reads models and prompts from a JSON file, and prints tokens and logprobs for each."""

from __future__ import annotations

import json
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import xllamacpp


def server(model: str) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 256, 1, 0
    params.cpuparams.n_threads = (
        1  # several wait for each other by spinning, which takes minutes on busy cores
    )
    params.warmup = False
    params.verbosity = -1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(params)


def post(running: Any, path: str, body: dict[str, Any]) -> Any:
    """Sends a request to the server's own routes, which return the tokens."""
    content = json.dumps({**body, "temperature": 0, "cache_prompt": False}).encode()
    request = Request(running.listening_address + path, content, {"content-type": "application/json"})
    with urlopen(request) as reply:
        return json.load(reply)


def sample(running: Any, request: dict[str, Any]) -> dict[str, Any]:
    body = dict(request)
    if "messages" in body:
        body = {**body, **post(running, "/apply-template", {"messages": body.pop("messages")})}
    reply = post(running, "/completion", {**body, "n_probs": 1, "return_tokens": True})
    steps = zip(reply["completion_probabilities"], reply["tokens"], strict=False)
    # The list lacks tokens that are part of a character.
    aligned = takewhile(lambda step: step[0]["id"] == step[1], steps)
    return {
        "num_prompt_tokens": reply["tokens_evaluated"],
        "tokens": reply["tokens"],
        "logprobs": [step["logprob"] for step, _ in aligned],
    }


replies = []
for one in json.loads(Path(sys.argv[1]).read_text()):
    running = server(one["model"])
    replies.append([sample(running, request) for request in one["requests"]])
print(json.dumps(replies))
