"""The text of a response is the text of its stream, whatever the tokens and stop strings are."""

from __future__ import annotations

import asyncio

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.api.compatible.models import find_model
from tinkex.engine.api.compatible.samples import find_stop, new_detokenizer, text_of
from tinkex.engine.engine import Engine
from tinkex.engine.sampler.stopping import StopRule
from tinkex.types import SampledSequence, SamplingParams, StopReason

STOPS = st.lists(st.sampled_from(["a", "th", "the ", "é", "<|im_end|>", "!!", "\n"]), max_size=3, unique=True)


def test_text_is_the_same_as_a_whole_and_token_by_token(engine: Engine) -> None:
    model = asyncio.run(find_model(engine, "local", "tiny"))
    table = model.tokenizer.token_bytes

    @given(st.lists(st.integers(0, len(table) - 1), min_size=1, max_size=40), STOPS)
    def check(tokens: list[int], stops: list[str]) -> None:
        params = SamplingParams(stop=list(stops) or None)
        rule = StopRule.of(params.stop, eos_token_ids=[2], vocab_size=len(table))
        checker = rule.checker(lambda token: table[token])
        ends = next((n for n, token in enumerate(tokens, 1) if checker.stops(token)), None)
        reason: StopReason = "stop" if ends is not None else "length"
        kept = tokens[:ends]
        sequence = SampledSequence(reason, "id", np.array(kept, np.int32))
        detokenizer = new_detokenizer(model, params)
        last = len(kept) - 1
        streamed = [detokenizer.add(token, reason if n == last else None) for n, token in enumerate(kept)]
        text = text_of(model, params, sequence)
        assert text == "".join(streamed)
        stop = find_stop(model, params, kept)
        assert stop is None or (stop in stops and stop not in text)

    check()
