"""``POST /completions``: prompts continued as they are, as text or as token ids."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tinkex.engine.api.call import Call, Reply
from tinkex.engine.api.compatible.fields import given_fields, ignored_header
from tinkex.engine.api.compatible.models import ModelChoice, find_model
from tinkex.engine.api.compatible.replies import choices_reply, count_values
from tinkex.engine.api.compatible.samples import (
    MAX_LOOP_CHARS,
    await_responses,
    check_length,
    new_detokenizer,
    sample_request,
    stream_samples,
    submit,
    text_of,
)
from tinkex.engine.api.compatible.token_text import TextOffsets, TokenLogprobs, completion_logprobs
from tinkex.engine.api.event_stream import EventStream
from tinkex.engine.api.field_errors import InvalidField
from tinkex.engine.api.openai.parameters import check_number, native_params, structured_output
from tinkex.engine.api.openai.requests import IGNORED, CompletionRequest
from tinkex.engine.api.openai.stream import encode_stream, new_id, usage
from tinkex.types import SampledSequence, SampleRequest, SampleResponse, SamplingParams

DEFAULT_MAX_TOKENS = 16
NAMES = {
    "topk_sample_logprobs": "logprobs",
    "topk_prompt_logprobs": "logprobs",
    "structured_output": "structured_output",
}
"""What this route calls native fields."""
MAX_PROMPTS = 256
"""How many prompts a request may have; each is an operation of its own."""
MAX_LOOP_TOKENS = 2048
"""The tokens of prompts that are read on the event loop, in a few milliseconds."""


@dataclass(frozen=True)
class CompletionPrompt:
    """One prompt: its tokens, and its text if it was sent as text or is echoed."""

    tokens: Sequence[int]
    text: str


@dataclass(frozen=True)
class CompletionPlan:
    """A request, translated."""

    id: str
    request: CompletionRequest
    model: ModelChoice
    params: SamplingParams
    prompts: Sequence[CompletionPrompt]
    num_samples: int
    created: int = field(default_factory=lambda: int(time.time()))

    def samples(self) -> Sequence[SampleRequest]:
        """The native requests, one for each prompt."""
        count, scores_prompt = self.request.logprobs, self.request.echo and self.request.logprobs is not None
        return [
            sample_request(
                self.model,
                prompt.tokens,
                self.params,
                self.num_samples,
                topk_sample_logprobs=count or 0,
                prompt_logprobs=bool(scores_prompt),
                topk_prompt_logprobs=(count or 0) if scores_prompt else 0,
            )
            for prompt in self.prompts
        ]

    def envelope(self, choices: Sequence[object]) -> dict[str, Any]:
        """A response, or a chunk of one."""
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.request.model,
            "choices": choices,
        }


async def completions(call: Call) -> Reply:
    """Continue prompts; the answer is a response or, with ``stream``, its chunks."""
    request: CompletionRequest = call.request
    plan = await _plan(call, request)
    headers = ignored_header(given_fields(request, IGNORED))
    accepted = await submit(call, plan.samples(), NAMES)
    if request.stream:
        stream = stream_samples(call, accepted)
        return EventStream(encode_stream(stream, CompletionChunks(plan), NAMES), headers)
    responses = await await_responses(call, accepted, NAMES)
    choices = [
        partial(_choice, plan, number, index, response, sequence)
        for number, response in enumerate(responses)
        for index, sequence in enumerate(response.sequences)
    ]
    echoed = sum(len(prompt.tokens) for prompt in plan.prompts) * plan.num_samples if request.echo else 0
    num_values = count_values(responses, echoed, request.logprobs or 0)
    usage = {"usage": _usage(plan, responses)}
    return await choices_reply(call, choices, lambda made: plan.envelope(made) | usage, num_values, headers)


async def _plan(call: Call, request: CompletionRequest) -> CompletionPlan:
    num_samples = check_number("n", request.n, 1, call.engine.config.max_samples_per_request, default=1)
    max_tokens = request.max_tokens if request.max_tokens is not None else DEFAULT_MAX_TOKENS
    if max_tokens < 0 or (max_tokens == 0 and not request.echo):
        raise InvalidField(
            "max_tokens", f"max_tokens is {max_tokens}; give at least 1, or 0 with echo to score a prompt."
        )
    if request.logprobs is not None:
        check_number("logprobs", request.logprobs, 0, 20)
    if request.stream and request.echo and request.logprobs is not None:
        raise InvalidField(
            "echo", "echo with logprobs is not supported in streams; request it without stream."
        )
    model = await find_model(call.engine, call.owner, request.model)
    form = structured_output(request)
    params = native_params(request, max_tokens=max(max_tokens, 1), stop=request.stop, structured_output=form)
    given = split_prompts(request.prompt)
    if len(given) > MAX_PROMPTS:
        raise InvalidField(
            "prompt", f"prompt has {len(given)} prompts; send at most {MAX_PROMPTS} in one request."
        )
    for each in given:
        check_length(model, each, "prompt")

    def read_prompts() -> Sequence[CompletionPrompt]:
        return [_read_prompt(model, each, echo=bool(request.echo)) for each in given]

    small = sum(map(len, given)) <= (MAX_LOOP_CHARS if isinstance(given[0], str) else MAX_LOOP_TOKENS)
    prompts = read_prompts() if small else await model.run_on_thread(read_prompts)
    return CompletionPlan(new_id("cmpl-"), request, model, params, prompts, num_samples)


def split_prompts(prompt: str | list[str | int | list[int]]) -> Sequence[str | list[int]]:
    """The prompts of a request: a text, token ids, or a list of either.

    >>> split_prompts("Hi"), split_prompts([1, 2]), split_prompts([[1, 2], [3]])
    (['Hi'], [[1, 2]], [[1, 2], [3]])
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidField("prompt", "prompt is an empty list; give a text, token ids, or a list of either.")
    ids = [item for item in prompt if isinstance(item, int)]
    if ids:
        if len(ids) != len(prompt):
            raise InvalidField("prompt", "prompt mixes token ids with texts or lists; use one kind.")
        return [ids]
    return [item for item in prompt if not isinstance(item, int)]


def _read_prompt(model: ModelChoice, prompt: str | list[int], *, echo: bool) -> CompletionPrompt:
    if isinstance(prompt, str):
        return CompletionPrompt(_check(model.tokenizer.encode(prompt, add_special_tokens=True)), prompt)
    text = ""
    if echo:
        with contextlib.suppress(OverflowError):  # a token id that is not valid is rejected below
            text = model.tokenizer.decode_bytes(prompt).decode("utf-8", "replace")
    return CompletionPrompt(_check(prompt), text)


def _check(tokens: Sequence[int]) -> Sequence[int]:
    if not tokens:
        raise InvalidField("prompt", "prompt is empty; give at least one token.")
    return tokens


def _choice(
    plan: CompletionPlan, number: int, index: int, response: SampleResponse, sequence: SampledSequence
) -> dict[str, Any]:
    request, prompt = plan.request, plan.prompts[number]
    scores_only = request.max_tokens == 0
    text = "" if scores_only else text_of(plan.model, plan.params, sequence)
    logprobs = None
    if request.logprobs is not None:
        tokenizer = plan.model.tokenizer
        parts = []
        if request.echo:
            parts.append((TokenLogprobs.of_prompt(prompt.tokens, response), TextOffsets(tokenizer)))
        if not scores_only:
            start = len(prompt.text) if request.echo else 0
            parts.append((TokenLogprobs.of_sample(sequence), TextOffsets(tokenizer, start)))
        logprobs = completion_logprobs(tokenizer, parts, request.logprobs)
    choice: dict[str, Any] = {
        "index": number * plan.num_samples + index,
        "text": prompt.text + text if request.echo else text,
        "logprobs": logprobs,
        "finish_reason": "length" if scores_only else sequence.stop_reason,
    }
    if request.return_token_ids:
        choice |= {
            "token_ids": [] if scores_only else sequence.tokens,
            "prompt_token_ids": list(prompt.tokens),
        }
    return choice


def _usage(plan: CompletionPlan, responses: Sequence[SampleResponse]) -> Mapping[str, Any]:
    return usage(
        [len(prompt.tokens) for prompt in plan.prompts],
        responses,
        scores_only=plan.request.max_tokens == 0,
    )


class CompletionChunks:
    """The chunks of a stream."""

    def __init__(self, plan: CompletionPlan) -> None:
        self._plan = plan
        self._detokenizers: dict[int, Any] = {}
        self._offsets: dict[int, TextOffsets] = {}
        self._responses: dict[int, SampleResponse] = {}
        self.include_usage = bool(plan.request.stream_options and plan.request.stream_options.include_usage)

    def start(self) -> Sequence[Mapping[str, Any]]:
        """The chunks before the first token: the prompts, if they are echoed."""
        plan = self._plan
        chunks = []
        for number, prompt in enumerate(plan.prompts):
            for sample in range(plan.num_samples):
                index = number * plan.num_samples + sample
                echoed = prompt.text if plan.request.echo else ""
                self._offsets[index] = TextOffsets(plan.model.tokenizer, len(echoed))
                if echoed:
                    chunks.append(plan.envelope([self._choice(index, echoed, None, None)]))
        return chunks

    def tokens(self, number: int, sample: int, batch: Sequence[Any]) -> Sequence[Mapping[str, Any]]:
        """The chunk for new tokens of one sequence."""
        plan = self._plan
        index = number * plan.num_samples + sample
        if plan.request.max_tokens == 0:
            if batch[-1].stop_reason is None:
                return []
            choice = self._choice(index, "", None, "length")
            if plan.request.return_token_ids:
                choice |= {"token_ids": [], "prompt_token_ids": list(plan.prompts[number].tokens)}
            return [plan.envelope([choice])]
        detokenizer = self._detokenizers.get(index)
        is_first = detokenizer is None
        if detokenizer is None:
            detokenizer = self._detokenizers[index] = new_detokenizer(plan.model, plan.params)
        text = "".join([detokenizer.add(token.token, token.stop_reason) for token in batch])
        logprobs = None
        if plan.request.logprobs is not None:
            part = (TokenLogprobs.of_stream(batch), self._offsets[index])
            logprobs = completion_logprobs(plan.model.tokenizer, [part], plan.request.logprobs)
        choice = self._choice(index, text, logprobs, batch[-1].stop_reason)
        if plan.request.return_token_ids:
            choice["token_ids"] = [token.token for token in batch]
            if is_first:
                choice["prompt_token_ids"] = list(plan.prompts[number].tokens)
        return [plan.envelope([choice])]

    def end(self, number: int, response: SampleResponse) -> Sequence[Mapping[str, Any]]:
        """Take the response of a sample; its chunks have been sent."""
        self._responses[number] = response
        return []

    def usage(self) -> Mapping[str, Any]:
        """The last chunk, with the usage of the whole request."""
        responses = [self._responses[number] for number in sorted(self._responses)]
        return self._plan.envelope([]) | {"usage": _usage(self._plan, responses)}

    def _choice(self, index: int, text: str, logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
