"""Invalid requests to every endpoint are rejected with a reason, never with a 5xx, and the server stays healthy."""

from __future__ import annotations

import asyncio
import functools
import gc
import gzip
import json
import logging
import os
import tracemalloc
import zlib
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.bodies import TESTED_ENDPOINTS, generated, mutated_bytes, mutated_object
from tests.unit.engine.api.asgi import PROTO, Answer, Client
from tinkex._wire import proto as wire_proto
from tinkex._wire.endpoints import ENDPOINTS, Endpoint
from tinkex.types import Datum, ForwardBackwardRequest, ModelInput

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("TINKEX_FUZZ_EXAMPLES", settings.default.max_examples // 4))
FUZZ = settings(
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize=False,
)
TOKENS = [5, 6, 7, 8, 9]
ODD = st.text(max_size=30) | st.sampled_from(
    ["..", "%00", "a" * 3000, "x/y", "weights/../..", "\u202e", "{}"]
)
HEADERS = st.dictionaries(
    st.sampled_from(
        ["content-type", "content-encoding", "accept", "x-api-key", "x-stainless-package-version"]
    ),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40)
    | st.sampled_from(
        [PROTO, "gzip", "zstd", "br", "gzip, gzip", "text/html", "0.1", "x" * 20_000, "eyJ.eyJ.x"]
    ),
    max_size=3,
)


def send(
    client: Client,
    endpoint: Endpoint,
    body: bytes,
    path: str | None = None,
    headers: dict[str, str] | None = None,
) -> Answer:
    if endpoint.name == "delete_own_key":
        headers = {"x-api-key": "tml-not-missed", **(headers or {})}

    async def call() -> Answer:
        return await asyncio.wait_for(client.acall(endpoint.method, path or endpoint.path, body, headers), 60)

    answer = asyncio.run(call())
    assert answer.status < 500 or answer.status == 503, (
        answer.status,
        answer.body,
        endpoint.name,
        body[:300],
    )
    assert int(answer.headers["content-length"]) == len(answer.body)
    if answer.status >= 400 and answer.status != 408:
        assert answer.detail
    return answer


def still_serves(client: Client) -> None:
    run = client.create()
    step = client.result(client.post("optim_step", {"model_id": run, "seq_id": 1, "adam_params": {}}))
    assert "metrics" in step.json
    client.result(client.post("unload_model", {"model_id": run}))


@functools.cache
def run_of(client: Client) -> tuple[str, str, str]:
    """A session, a run and a sampler for valid bodies."""
    session = client.session()
    run = client.create(session)
    made = client.post(
        "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    )
    return session, run, made.json["sampling_session_id"]


def valid_bodies(client: Client) -> dict[str, dict[str, Any]]:
    session, run, sampler = run_of(client)
    prompt = {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]}
    given_data = {
        "data": [
            {
                "model_input": {"chunks": [{"type": "encoded_text", "tokens": TOKENS[:-1]}]},
                "loss_fn_inputs": {
                    "target_tokens": {"data": TOKENS[1:], "dtype": "int64", "shape": [4]},
                    "weights": {"data": [1.0, 0.5, 0.0, 1.0], "dtype": "float32", "shape": [4]},
                },
            }
        ],
        "loss_fn": "cross_entropy",
        "loss_fn_config": {"epsilon": 0.2},
    }
    return {
        "create_session": {"tags": ["a"], "user_metadata": {"k": "v"}, "sdk_version": "1", "project_id": "p"},
        "session_heartbeat": {"session_id": session},
        "create_model": {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": "tiny",
            "lora_config": {
                "rank": 4,
                "seed": 1,
                "train_mlp": True,
                "train_attn": True,
                "train_unembed": True,
            },
            "user_metadata": {"who": "me"},
        },
        "forward": {"forward_input": given_data, "model_id": run, "seq_id": 1},
        "forward_backward": {"forward_backward_input": given_data, "model_id": run, "seq_id": 1},
        "optim_step": {
            "model_id": run,
            "seq_id": 1,
            "adam_params": {
                "learning_rate": 0.1,
                "beta1": 0.9,
                "beta2": 0.95,
                "eps": 1e-8,
                "weight_decay": 0.0,
            },
        },
        "save_weights": {"model_id": run, "seq_id": 1, "path": "name", "ttl_seconds": 60},
        "save_weights_for_sampler": {
            "model_id": run,
            "seq_id": 1,
            "path": "name",
            "sampling_session_seq_id": 7,
        },
        "load_weights": {
            "model_id": run,
            "seq_id": 1,
            "path": f"tinker://{run}/weights/none",
            "optimizer": True,
        },
        "asample": {
            "sampling_session_id": sampler,
            "seq_id": 1,
            "prompt": prompt,
            "num_samples": 2,
            "sampling_params": {
                "max_tokens": 2,
                "temperature": 0.7,
                "top_k": 5,
                "top_p": 0.9,
                "seed": 3,
                "stop": ["a"],
                "min_p": 0.1,
                "presence_penalty": 0.5,
                "frequency_penalty": 0.5,
                "repetition_penalty": 1.1,
                "logit_bias": {"7": 2.5},
                "structured_output": {"json_schema": {"type": "array", "items": {"enum": [1, "a"]}}},
            },
            "prompt_logprobs": True,
            "topk_prompt_logprobs": 2,
        },
        "create_sampling_session": {
            "session_id": session,
            "sampling_session_seq_id": 9,
            "base_model": "tiny",
        },
        "join_sampling_session": {"sampling_session_id": sampler},
        "retrieve_future": {"request_id": "none", "allow_metadata_only": True},
        "retrieve_futures": {
            "target": {"sampling_session_id": sampler, "cloned_sampler_id": 0},
            "prev_cursor": 0,
            "timeout": 0.0,
            "retrieved_request_ids": ["a"],
        },
        "cancel_future": {"request_id": "none"},
        "get_info": {"model_id": run},
        "weights_info": {"tinker_path": f"tinker://{run}/weights/none"},
        "search_sessions": {
            "owner": {"type": "user", "owner_urns": ["local"]},
            "limit": 3,
            "user_metadata": {},
        },
        "search_checkpoints": {
            "project_ids": None,
            "user_metadata": {"a": "b"},
            "checkpoint_type": "training",
            "owner": {"type": "user", "owner_urns": ["local"]},
            "base_models": ["tiny"],
            "limit": 3,
            "cursor": {
                "last_created_at": "2026-01-01T00:00:00Z",
                "last_checkpoint_uuid": f"{(1767225600.0).hex()}/run/weights/name",
            },
        },
        "external_weights_upload_start": {
            "base_model": "tiny:peft:64",
            "lora_config": {"rank": 2, "seed": 1, "train_mlp": False},
            "destination_project_id": "p",
        },
        "external_weights_upload_finish": {"upload_id": "upload-0"},
        "external_weights_upload_cancel": {"upload_id": "upload-0"},
    }


@pytest.mark.parametrize("endpoint", TESTED_ENDPOINTS, ids=lambda endpoint: endpoint.name)
def test_generated_bodies_never_make_the_server_fail(endpoint: Endpoint, fuzzed: Client) -> None:
    @FUZZ
    @given(generated(endpoint), HEADERS)
    def check(body: bytes, headers: dict[str, str]) -> None:
        send(fuzzed, endpoint, body, headers=headers)

    check()


@pytest.mark.parametrize("name", [
    "create_session", "session_heartbeat", "create_model", "forward", "forward_backward", "optim_step",
    "save_weights", "save_weights_for_sampler", "load_weights", "asample", "create_sampling_session",
    "join_sampling_session", "retrieve_future", "retrieve_futures", "cancel_future", "get_info", "weights_info",
    "search_sessions", "search_checkpoints", "external_weights_upload_start", "external_weights_upload_finish",
    "external_weights_upload_cancel",
])  # fmt: skip
def test_mutated_bodies_never_make_the_server_fail(name: str, fuzzed: Client) -> None:
    body = valid_bodies(fuzzed)[name]

    @FUZZ
    @given(mutated_object(body) | mutated_bytes(json.dumps(body).encode()))
    def check(changed: bytes) -> None:
        answer = send(fuzzed, ENDPOINTS[name], changed)
        if answer.status == 200 and ENDPOINTS[name].is_future:
            fuzzed.result(answer, accept="application/json")

    check()
    still_serves(fuzzed)


def test_arbitrary_parts_of_arbitrary_files_never_make_the_server_fail(fuzzed: Client) -> None:
    start = {"base_model": "tiny", "lora_config": {"rank": 2}}
    numbers = st.integers(0, 40)
    ranges = st.builds("bytes {}-{}/{}".format, numbers, numbers, numbers) | st.builds(
        "bytes */{}".format, numbers
    )
    parts = st.tuples(
        st.booleans(),
        st.binary(max_size=40) | st.just(b"{}"),
        st.dictionaries(
            st.just("content-range"), ranges | st.text(st.characters(codec="ascii"), max_size=20)
        ),
    )

    @settings(FUZZ, max_examples=2 * EXAMPLES)
    @given(st.lists(parts, max_size=5), st.sampled_from(["finish", "cancel"]))
    def check(sent: list[tuple[bool, bytes, dict[str, str]]], end: str) -> None:
        upload = fuzzed.post("external_weights_upload_start", start).json
        urls = list(upload["urls"].values())
        for is_config, body, headers in sent:
            path = urlsplit(urls[is_config]).path
            send(fuzzed, ENDPOINTS["upload_file"], body, path, headers)
        for name in (end, "cancel"):
            body = json.dumps({"upload_id": upload["upload_id"]}).encode()
            send(fuzzed, ENDPOINTS[f"external_weights_upload_{name}"], body)

    check()
    still_serves(fuzzed)


def test_corrupt_protobuf_never_makes_the_server_fail(fuzzed: Client) -> None:
    _, run, _ = run_of(fuzzed)
    datum = Datum(ModelInput.from_ints(TOKENS[:-1]), {"target_tokens": TOKENS[1:], "weights": [1.0] * 4})
    right = wire_proto.encode_forward_backward(
        ForwardBackwardRequest(model_id=run, seq_id=1, data=[datum], loss_fn="cross_entropy")
    )

    @settings(FUZZ, max_examples=6 * EXAMPLES)
    @given(mutated_bytes(right) | st.binary(max_size=300))
    def check(changed: bytes) -> None:
        answer = send(fuzzed, ENDPOINTS["forward_backward"], changed, headers={"content-type": PROTO})
        if answer.status == 200:
            fuzzed.result(answer)

    check()
    still_serves(fuzzed)


@pytest.mark.parametrize(
    "endpoint",
    [endpoint for endpoint in TESTED_ENDPOINTS if "{" in endpoint.path],
    ids=lambda endpoint: endpoint.name,
)
def test_arbitrary_paths_never_make_the_server_fail(endpoint: Endpoint, fuzzed: Client) -> None:
    @FUZZ
    @given(st.lists(ODD, min_size=3, max_size=3), st.dictionaries(ODD, ODD, max_size=2))
    def check(names: list[str], query: dict[str, str]) -> None:
        path = endpoint.path
        for name in names:
            start, brace, rest = path.partition("{")
            if brace:
                # Path parameters arrive unquoted, query parameters quoted.
                path = start + name.replace("?", "").replace("#", "") + rest.partition("}")[2]
        text = "&".join(f"{quote(key, safe='')}={quote(value, safe='')}" for key, value in query.items())
        send(fuzzed, endpoint, b"{}", path=f"{path}?{text}")

    check()


@pytest.mark.parametrize(
    "endpoint",
    [endpoint for endpoint in TESTED_ENDPOINTS if endpoint.method == "GET"],
    ids=lambda endpoint: endpoint.name,
)
def test_arbitrary_queries_never_make_the_server_fail(endpoint: Endpoint, fuzzed: Client) -> None:
    names = [
        "limit",
        "offset",
        "access_scope",
        "project_id",
        "starting_on",
        "ending_before",
        "base_model",
        "start",
    ]
    values = (
        ODD | st.integers(-(2**70), 2**70).map(str) | st.sampled_from(["1_0", "٣", "9999-12-31T23:59:59Z"])
    )

    @FUZZ
    @given(st.dictionaries(st.sampled_from(names), values, max_size=4))
    def check(query: dict[str, str]) -> None:
        text = "&".join(f"{name}={quote(value, safe='')}" for name, value in query.items())
        send(fuzzed, endpoint, b"", path=f"{endpoint.path}?{text}")

    check()


@pytest.mark.slow
def test_decompression_bombs_are_rejected_before_they_fill_the_memory(fuzzed: Client) -> None:
    plain = b" " * (64 << 20)
    bombs = {
        "gzip": gzip.compress(plain),
        "deflate": zlib.compress(plain),
        "zstd": zstandard.ZstdCompressor().compress(plain),
    }
    del plain
    for encoding, bomb in bombs.items():
        tracemalloc.start()
        headers = {"content-encoding": encoding}
        answer = send(fuzzed, ENDPOINTS["asample"], bomb, headers=headers)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert answer.status == 413, encoding
        assert peak < 16 << 20, encoding
        cut = send(fuzzed, ENDPOINTS["asample"], bomb[: len(bomb) // 2], headers=headers)
        assert cut.status in {400, 413}
    deep = b"[" * 100_000
    assert send(fuzzed, ENDPOINTS["create_session"], b'{"user_metadata":' + deep).status == 413


@pytest.mark.slow
def test_invalid_requests_do_not_leak_memory(fuzzed: Client, caplog: pytest.LogCaptureFixture) -> None:
    """The growth over the second half of the rounds is small compared with the bodies of one round."""

    def send_invalid(rounds: int) -> None:
        for number in range(rounds):
            for endpoint in TESTED_ENDPOINTS:
                body = json.dumps({"session_id": f"none-{number}", "x": "y" * 2000}).encode()
                send(fuzzed, endpoint, body, path=endpoint.path.replace("{", f"{number}").replace("}", ""))

    # Log records that pytest keeps for its report are not the server's memory.
    for name in ("tinkex", "tinkex.access"):
        caplog.set_level(logging.CRITICAL, name)
    send_invalid(3)
    gc.collect()
    tracemalloc.start()
    send_invalid(3)
    gc.collect()
    middle, _ = tracemalloc.get_traced_memory()
    send_invalid(12)
    gc.collect()
    end, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    sent = 12 * len(TESTED_ENDPOINTS) * 2000
    assert end - middle < sent / 4
    still_serves(fuzzed)
