"""Replies of compatible routes: large ones are built on a thread, choice by choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from tinkex._wire import json as wire_json
from tinkex.engine.api.call import Call
from tinkex.engine.api.errors import json_response
from tinkex.types import SampleResponse

MAX_LOOP_VALUES = 8192
"""Up to this many tokens and logprobs a reply is built on the event loop, in 20 ms or less."""


async def choices_reply(
    call: Call,
    make_choices: Sequence[Callable[[], Mapping[str, Any]]],
    make_body: Callable[[Sequence[object]], Mapping[str, Any]],
    num_values: int,
    headers: Mapping[str, str],
) -> Response:
    """The reply with all choices; each is encoded before the next one is made, because as objects they take much more memory."""

    def build() -> Response:
        choices = [msgspec.Raw(wire_json.encode(make(), omit_none=False)) for make in make_choices]
        return json_response(make_body(choices), headers=headers, omit_none=False)

    if num_values <= MAX_LOOP_VALUES:
        return build()
    return await call.run_on_thread(build)


def count_values(responses: Sequence[SampleResponse], num_prompt_tokens: int, num_top: int) -> int:
    """How many tokens and logprobs a reply has."""
    sampled = sum(len(sequence.tokens_np) for response in responses for sequence in response.sequences)
    return (sampled + num_prompt_tokens) * (1 + num_top)
