"""Proofs for the fields of sample requests."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.engine_fields.rig import MODEL, OTHER_MODEL, TOKENS, Rig, assert_rejected
from tests.engine_fields.table import proves
from tinkex.types import Datum, ImageChunk, ModelInput
from tinkex.types.sampling import EMPTY_LOGPROB


@proves("SamplingParams.max_tokens")
def max_tokens(rig: Rig) -> None:
    assert [len(rig.tokens({"max_tokens": most})[0]) for most in (1, 4)] == [1, 4]
    assert len(rig.tokens({"max_tokens": None})[0]) == 512 - len(TOKENS)


@proves("SamplingParams.seed")
def seed(rig: Rig) -> None:
    first, again, other = (rig.tokens({"seed": number}) for number in (5, 5, 6))
    assert first == again != other


@proves("SamplingParams.stop")
def stop(rig: Rig) -> None:
    [tokens] = rig.tokens()
    assert rig.tokens({"stop": [tokens[2]]}) == [tokens[: tokens.index(tokens[2]) + 1]]


@proves("SamplingParams.temperature")
def temperature(rig: Rig) -> None:
    assert rig.tokens({"temperature": 0, "seed": 1}) == rig.tokens({"temperature": 0, "seed": 2})
    assert rig.tokens({"temperature": 9.0}) != rig.tokens({"temperature": 0.1})


@proves("SamplingParams.top_k")
def top_k(rig: Rig) -> None:
    greedy = rig.tokens({"temperature": 0})
    assert rig.tokens({"temperature": 5.0, "top_k": 1}) == greedy != rig.tokens({"temperature": 5.0})


@proves("SamplingParams.top_p")
def top_p(rig: Rig) -> None:
    greedy = rig.tokens({"temperature": 0})
    assert rig.tokens({"temperature": 5.0, "top_p": 1e-6}) == greedy != rig.tokens({"temperature": 5.0})


@proves("SamplingParams.min_p")
def min_p(rig: Rig) -> None:
    greedy = rig.tokens({"temperature": 0})
    assert rig.tokens({"temperature": 5.0, "min_p": 1.0}) == greedy != rig.tokens({"temperature": 5.0})
    assert_rejected(rig.submit_sample({"min_p": 1.5}), "min_p")


@proves("SamplingParams.presence_penalty", "SamplingParams.frequency_penalty")
def penalties(rig: Rig) -> None:
    few = {"temperature": 0, "max_tokens": 30, "logit_bias": {str(token): 50.0 for token in range(40, 60)}}
    plain, present, frequent = (
        len(set(rig.tokens({**few, **penalty})[0]))
        for penalty in ({}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0})
    )
    assert plain < present
    assert plain < frequent
    assert_rejected(rig.submit_sample({"presence_penalty": 3}), "presence_penalty")
    assert_rejected(rig.submit_sample({"frequency_penalty": -3}), "frequency_penalty")


@proves("SamplingParams.repetition_penalty")
def repetition_penalty(rig: Rig) -> None:
    [plain] = rig.tokens({"temperature": 0})
    [other] = rig.tokens({"temperature": 0, "repetition_penalty": 100.0})
    assert plain != other
    assert not set(other) & set(TOKENS)
    assert_rejected(rig.submit_sample({"repetition_penalty": 0}), "repetition_penalty")


@proves("SamplingParams.logit_bias")
def logit_bias(rig: Rig) -> None:
    assert rig.tokens({"logit_bias": {"33": 100.0}}) == [[33] * 6]
    assert_rejected(rig.submit_sample({"logit_bias": {"33": 101}}), "logit_bias")
    assert_rejected(rig.submit_sample({"logit_bias": {"100000": 1}}), "100000")
    assert_rejected(rig.submit_sample({"logit_bias": {"word": 1}}), "logit_bias")


def text(rig: Rig, **wanted: Any) -> str:
    """The text of a sample that ends by itself."""
    [sequence] = rig.sample({"max_tokens": 60, "structured_output": wanted}).sequences
    assert sequence.stop_reason == "stop"
    return rig.engine.models.find(MODEL).tokenizer.decode(sequence.tokens, skip_special_tokens=True)


@proves(
    "SamplingParams.structured_output",
    "StructuredOutput.json_schema",
    "StructuredOutput.regex",
    "StructuredOutput.grammar",
)
def structured_output(rig: Rig) -> None:
    assert text(rig, json_schema={"enum": ["a"]}) == '"a"'
    assert text(rig, regex="ab?c") in {"ac", "abc"}
    assert text(rig, grammar='start: "x" "y"') == "xy"
    for wanted, words in (
        ({"json_schema": {"uniqueItems": True}}, "uniqueItems"),
        ({"json_schema": False}, "json_schema"),
        ({"regex": "(a"}, "regex"),
        ({"grammar": "x"}, "grammar"),
        ({"regex": "a", "grammar": "b"}, "regex and grammar"),
        ({}, "nothing"),
        ({"xml": "a"}, "xml"),
    ):
        assert_rejected(rig.submit_sample({"structured_output": wanted}), words)


@proves("SampleRequest.prompt", "ModelInput.chunks", "EncodedTextChunk.tokens")
def prompt(rig: Rig) -> None:
    other = {"chunks": [{"type": "encoded_text", "tokens": [9, 8]}]}
    assert rig.tokens(prompt=other) != rig.tokens()
    one_by_one = {"chunks": [{"type": "encoded_text", "tokens": [token]} for token in TOKENS]}
    assert rig.tokens(prompt=one_by_one) == rig.tokens()
    loud = {"chunks": [{"type": "encoded_text", "tokens": TOKENS, "loud": True}]}
    assert_rejected(rig.submit_sample(prompt=loud), "loud")


@proves(
    "ImageChunk.data",
    "ImageChunk.format",
    "ImageChunk.expected_tokens",
    "ImageAssetPointerChunk.location",
    "ImageAssetPointerChunk.format",
    "ImageAssetPointerChunk.expected_tokens",
    "DmelChunk.dmel",
)
def prompts_that_are_not_text(rig: Rig) -> None:
    picture = {"type": "image", "data": "aGk=", "format": "png", "expected_tokens": 2}
    pointer = {"type": "image_asset_pointer", "location": "x", "format": "png", "expected_tokens": 2}
    for chunk in (picture, {"type": "dmel", "dmel": "AAEC"}):
        assert_rejected(rig.submit_sample(prompt={"chunks": [chunk]}), str(chunk["type"]))
    assert_rejected(rig.submit_sample(prompt={"chunks": [pointer]}), "points to 'x'")
    run = rig.run()
    shown = Datum(
        ModelInput(chunks=[ImageChunk(data=b"hi", format="png", expected_tokens=2)]),
        {"target_tokens": [1, 2]},
    )
    assert_rejected(run.submit_pass([shown]), "image")


@proves("SampleRequest.sampling_params")
def sampling_params(rig: Rig) -> None:
    assert_rejected(rig.submit_sample({"beam_width": 4}), "beam_width")


@proves("SampleRequest.num_samples")
def num_samples(rig: Rig) -> None:
    three = rig.tokens(num_samples=3)
    assert len({tuple(tokens) for tokens in three}) == 3


@proves("SampleRequest.sampling_session_id")
def sampling_session_id(rig: Rig) -> None:
    assert_rejected(rig.submit_sample(sampling_session_id="nobody:sample:0"), "nobody:sample:0", 404)
    other = rig.sampler(base_model=OTHER_MODEL)
    assert rig.tokens(sampling_session_id=other) != rig.tokens()


@proves("SampleRequest.seq_id")
def seq_id(rig: Rig) -> None:
    request = rig.sample_request()
    first, again = (rig.ada.post("asample", request).json["request_id"] for _ in range(2))
    other = rig.ada.post("asample", {**request, "seq_id": request["seq_id"] + 10**6}).json["request_id"]
    assert first == again != other
    changed = {**request, "num_samples": 2}
    assert_rejected(rig.ada.post("asample", changed), "already used by another")


@proves("SampleRequest.base_model")
def base_model(rig: Rig) -> None:
    named = {"sampling_session_id": None, "seq_id": None}
    assert rig.tokens(**named, base_model=MODEL) == rig.tokens()
    assert rig.tokens(**named, base_model=OTHER_MODEL) != rig.tokens()


@proves("SampleRequest.model_path")
def model_path(rig: Rig) -> None:
    run = rig.run()
    run.train(5, learning_rate=0.1)
    named = {"sampling_session_id": None, "seq_id": None}
    assert rig.tokens(**named, model_path=run.save()) != rig.tokens()


@proves("SampleRequest.prompt_logprobs")
def prompt_logprobs(rig: Rig) -> None:
    assert rig.sample().prompt_logprobs is None
    assert len(rig.sample(prompt_logprobs=True).prompt_logprobs or []) == len(TOKENS)


@proves("SampleRequest.topk_prompt_logprobs")
def topk_prompt_logprobs(rig: Rig) -> None:
    assert rig.sample().topk_prompt_logprobs is None
    rows = rig.sample(topk_prompt_logprobs=2).topk_prompt_logprobs
    assert rows is not None
    assert [len(row or []) for row in rows] == [0] + [2] * (len(TOKENS) - 1)


@proves("SampleRequest.topk_sample_logprobs")
def topk_sample_logprobs(rig: Rig) -> None:
    assert rig.sample().sequences[0].topk_logprobs is None
    rows = rig.sample(topk_sample_logprobs=3).sequences[0].topk_logprobs
    assert rows is not None
    assert [len(row or []) for row in rows] == [3] * 6


@proves("SampleRequest.target_prompt_logprobs")
def target_prompt_logprobs(rig: Rig) -> None:
    cells = {"data": [TOKENS[1], *[-1] * (len(TOKENS) - 2)], "dtype": "int64", "shape": [len(TOKENS) - 1, 1]}
    got = rig.sample(target_prompt_logprobs=cells, prompt_logprobs=True)
    assert got.target_prompt_logprobs is not None
    assert got.prompt_logprobs is not None
    values = got.target_prompt_logprobs.to_numpy()[:, 0]
    assert np.isclose(values[0], got.prompt_logprobs[1])
    assert (values[1:] == 0).all()


@proves(
    "TensorData.data",
    "TensorData.dtype",
    "TensorData.shape",
    "TensorData.sparse_crow_indices",
    "TensorData.sparse_col_indices",
)
def tensors(rig: Rig) -> None:
    rows = len(TOKENS) - 1
    sparse = {
        "data": [7],
        "dtype": "int64",
        "shape": [rows, 2],
        "sparse_crow_indices": [0, 0, *[1] * (rows - 1)],
        "sparse_col_indices": [1],
    }

    def scored(**changes: Any) -> list[list[float]]:
        got = rig.sample(target_prompt_logprobs={**sparse, **changes}).target_prompt_logprobs
        assert got is not None
        return got.to_numpy(pad_value=0).round(4).tolist()

    usual = scored()
    assert usual[1][1] < 0 == sum(map(sum, usual)) - usual[1][1]
    assert scored(data=[8])[1][1] != usual[1][1]
    assert scored(sparse_col_indices=[0])[1][0] == usual[1][1]
    assert scored(sparse_crow_indices=[0, *[1] * rows])[0][1] < 0
    for wrong in ({"dtype": "float32"}, {"shape": [rows, 1]}, {"sparse_crow_indices": None}):
        assert_rejected(rig.submit_sample(target_prompt_logprobs={**sparse, **wrong}), "")


@proves("SampleRequest.prompt_alt_tokens_k")
def prompt_alt_tokens_k(rig: Rig) -> None:
    assert rig.sample().prompt_alt_tokens is None
    drawn = rig.sample(prompt_alt_tokens_k=4).prompt_alt_tokens
    assert drawn is not None
    assert drawn.tokens.shape == [len(TOKENS) - 1, 4]


@proves("SampleRequest.prompt_logprobs_last_n")
def prompt_logprobs_last_n(rig: Rig) -> None:
    got = rig.sample(prompt_logprobs=True, topk_prompt_logprobs=1, prompt_logprobs_last_n=2)
    assert got.prompt_logprobs is not None
    assert [number is None for number in got.prompt_logprobs] == [True] * (len(TOKENS) - 2) + [False] * 2
    assert got.topk_prompt_logprobs_np is not None
    assert (got.topk_prompt_logprobs_np.logprobs[:-2] == EMPTY_LOGPROB).all()


@proves("SampleRequest.record_stability_info")
def record_stability_info(rig: Rig) -> None:
    assert_rejected(rig.submit_sample(record_stability_info=True), "record_stability_info", 400, 501)


@proves("CreateSamplingSessionRequest.session_id", "CreateSamplingSessionRequest.sampling_session_seq_id")
def sampler_number(rig: Rig) -> None:
    session = rig.ada.session()
    made = [
        rig.ada.post(
            "create_sampling_session",
            {"session_id": session, "sampling_session_seq_id": number, "base_model": MODEL},
        ).json["sampling_session_id"]
        for number in (3, 4)
    ]
    assert made == [f"{session}:sample:3", f"{session}:sample:4"]
    unknown = {"session_id": "nowhere", "base_model": MODEL}
    assert_rejected(rig.ada.post("create_sampling_session", unknown), "nowhere", 404)


@proves("CreateSamplingSessionRequest.base_model")
def sampler_base_model(rig: Rig) -> None:
    unknown = {"session_id": rig.ada.session(), "base_model": "unheard-of"}
    assert_rejected(rig.ada.post("create_sampling_session", unknown), "unheard-of", 404)
    shown = rig.ada.get(f"samplers/{rig.sampler(base_model=OTHER_MODEL)}").json
    assert shown["base_model"] == OTHER_MODEL


@proves("CreateSamplingSessionRequest.model_path")
def sampler_model_path(rig: Rig) -> None:
    run = rig.run()
    run.train(5, learning_rate=0.1)
    assert rig.tokens(sampling_session_id=rig.sampler(model_path=run.save())) != rig.tokens()


@proves("JoinSamplingSessionRequest.sampling_session_id")
def join_sampling_session(rig: Rig) -> None:
    assert_rejected(
        rig.ada.post("join_sampling_session", {"sampling_session_id": "no:sample:0"}), "no:sample:0", 404
    )
    mine = rig.sampler()
    numbers = [
        rig.ada.post("join_sampling_session", {"sampling_session_id": mine}).json["client_counter"]
        for _ in range(2)
    ]
    assert numbers[0] != numbers[1]
