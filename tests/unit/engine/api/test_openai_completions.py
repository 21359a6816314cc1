"""``/v1/completions`` and ``/v1/models``: every field is honoured or rejected, and text is that of the native sample."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine.api.asgi import Answer, Client
from tests.unit.engine.api.test_sampling import request as native_request
from tests.unit.engine.api.test_sampling import sampler
from tinkex.engine.api.app import build_app
from tinkex.engine.config import EngineConfig
from tinkex.engine.engine import Engine
from tinkex.types import SamplingParams

pytestmark = pytest.mark.slow

PROMPT = [5, 6, 7]


def complete(client: Client, path: str = "/v1/completions", **fields: Any) -> Answer:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "seed": 3, **fields}
    return client.call("POST", path, {name: value for name, value in body.items() if value is not ...})


def error(answer: Answer) -> dict[str, Any]:
    found: dict[str, Any] = answer.json["error"]
    return found


def chunks(answer: Answer) -> list[dict[str, Any]]:
    blocks = [block for block in answer.body.decode().split("\n\n") if block.startswith("data: ")]
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


def native(client: Client, number: int = 1, **params: Any) -> list[dict[str, Any]]:
    """The sequences of the same sample through the native API."""
    body = native_request(sampler(client), 0, number, **params)
    body["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}
    result = client.result(client.post("asample", body), accept="application/json").json
    sequences: list[dict[str, Any]] = result["sequences"]
    return sequences


def text_of(engine: Engine, tokens: list[int]) -> str:
    return engine.models.find("tiny").tokenizer.decode_bytes(tokens).decode("utf-8", "replace")


def test_a_completion_is_the_native_sample_of_the_same_seed(ada: Client, engine: Engine) -> None:
    params = {"max_tokens": 12, "seed": 11, "temperature": 0.8, "top_p": 0.9, "top_k": 40}
    answer = complete(ada, n=2, return_token_ids=True, logprobs=0, **params).json
    for choice, sequence in zip(answer["choices"], native(ada, 2, stop=None, **params), strict=True):
        assert choice["token_ids"] == sequence["tokens"]
        assert choice["logprobs"]["token_logprobs"] == sequence["logprobs"]
        ended = choice["finish_reason"] == "stop"
        assert choice["text"] == text_of(engine, choice["token_ids"][: -1 if ended else None])
        assert choice["prompt_token_ids"] == PROMPT
    assert answer["usage"]["prompt_tokens"] == 3
    sampled = sum(len(choice["token_ids"]) for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == sampled
    assert answer["usage"]["total_tokens"] == 3 + sampled
    assert answer["object"] == "text_completion"


@pytest.mark.parametrize("num_top", [0, 3, 20])
def test_a_stream_has_the_text_tokens_logprobs_and_usage_of_the_response(ada: Client, num_top: int) -> None:
    asked = {"n": 2, "prompt": ["The quick", "A model"], "logprobs": num_top, "return_token_ids": True}
    whole = complete(ada, **asked).json
    streamed = chunks(complete(ada, stream=True, stream_options={"include_usage": True}, **asked))
    assert streamed[-1]["choices"] == []
    assert streamed[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert all(chunk["usage"] is None for chunk in streamed[:-1])
    parts = [choice for chunk in streamed for choice in chunk["choices"]]
    for choice in whole["choices"]:
        mine = [part for part in parts if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert [token for part in mine for token in part["token_ids"]] == choice["token_ids"]
        prompts = [part["prompt_token_ids"] for part in mine if "prompt_token_ids" in part]
        assert prompts == [choice["prompt_token_ids"]]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert all(part["finish_reason"] is None for part in mine[:-1])
        assert all(len(top) >= max(1, num_top // 2) for top in choice["logprobs"]["top_logprobs"])
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [value for part in mine for value in part["logprobs"][name]]
            assert joined == choice["logprobs"][name]


def test_streams_without_usage_have_none(ada: Client) -> None:
    assert all("usage" not in chunk for chunk in chunks(complete(ada, stream=True)))


def test_text_and_its_tokens_are_the_same_prompt(ada: Client, engine: Engine) -> None:
    tokens = engine.models.find("tiny").tokenizer.encode("The quick")
    by_text, by_ids = complete(ada, prompt="The quick").json, complete(ada, prompt=tokens).json
    both = complete(ada, prompt=["The quick", "The quick"]).json["choices"]
    assert by_text["choices"] == by_ids["choices"] == both[:1]
    assert [choice["index"] for choice in both] == [0, 1]
    assert complete(ada, prompt=[tokens, tokens]).json["choices"] == both


def test_echo_scores_a_prompt_without_continuing_it(ada: Client, engine: Engine) -> None:
    answer = complete(ada, prompt="The quick brown", echo=True, max_tokens=0, logprobs=2).json
    (choice,) = answer["choices"]
    tokens = engine.models.find("tiny").tokenizer.encode("The quick brown")
    assert choice["text"] == "The quick brown"
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == "The quick brown"
    assert len(logprobs["tokens"]) == len(tokens)
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    computed = native_prompt_logprobs(ada, tokens)
    assert logprobs["token_logprobs"][1:] == pytest.approx(computed[1:], abs=1e-6)
    assert logprobs["text_offset"] == [
        len("".join(logprobs["tokens"][:index])) for index in range(len(tokens))
    ]
    rows = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    for token, logprob, top in list(rows)[1:]:
        assert top[token] == logprob
        assert len(top) in {2, 3}
    assert answer["usage"]["completion_tokens"] == 0


def native_prompt_logprobs(client: Client, tokens: list[int]) -> list[float]:
    body = native_request(sampler(client), 0, 1, max_tokens=1)
    body["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
    body["prompt_logprobs"] = True
    found: list[float] = client.result(client.post("asample", body), accept="application/json").json[
        "prompt_logprobs"
    ]
    return found


def test_echo_precedes_the_text_also_in_streams(ada: Client) -> None:
    whole = complete(ada, prompt="The quick", echo=True, logprobs=1).json["choices"][0]
    plain = complete(ada, prompt="The quick").json["choices"][0]
    assert whole["text"] == "The quick" + plain["text"]
    assert len(whole["logprobs"]["tokens"]) > len("x")
    streamed = chunks(complete(ada, prompt="The quick", echo=True, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == whole["text"]
    scored = chunks(complete(ada, prompt="The quick", echo=True, stream=True, max_tokens=0))
    assert "".join(chunk["choices"][0]["text"] for chunk in scored) == "The quick"
    assert scored[-1]["choices"][0]["finish_reason"] == "length"


def test_stop_strings_are_not_part_of_the_text(ada: Client) -> None:
    text = complete(ada, temperature=0, max_tokens=20).json["choices"][0]["text"]
    stop = next(text[n : n + 2] for n in range(3, len(text)) if text[n : n + 2].isascii())
    for stream in (False, True):
        answer = complete(ada, temperature=0, max_tokens=20, stop=[stop, "never"], stream=stream)
        choices = [chunk["choices"][0] for chunk in (chunks(answer) if stream else [answer.json])]
        assert "".join(choice["text"] for choice in choices) == text[: text.index(stop)]
        assert choices[-1]["finish_reason"] == "stop"


def test_sixteen_tokens_are_the_default(ada: Client) -> None:
    answer = complete(ada, max_tokens=None, temperature=0).json
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"max_tokens": "8"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 1e300}, "temperature"),
        ({"stop": [f"stop {n}" for n in range(5000)]}, "stop"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"the": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "big"}}, "logit_bias"),
        ({"logit_bias": {"5": 200}}, "logit_bias"),
        ({"logit_bias": {"9999999": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 0, "echo": True, "stream": True}, "echo"),
        ({"n": 0}, "n"),
        ({"n": 10_000}, "n"),
        ({"stop": [1]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"seed": 1.5}, "seed"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"chunk_size": 1}}, "stream_options.chunk_size"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [5] * 600}, "prompt"),
        ({"prompt": ...}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"model": ...}, "model"),
        ({"model": 3}, "model"),
        ({"model": "tiny;tinker://x"}, "model"),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_honoured_is_a_400_that_names_it(
    ada: Client, fields: dict[str, Any], field: str
) -> None:
    answer = complete(ada, **fields)
    assert answer.status == 400
    found = error(answer)
    assert found["type"] == "invalid_request_error"
    assert (found["param"] or "").partition("[")[0] == field
    assert field in found["message"]


def test_prompts_that_do_not_fit_are_rejected(ada: Client) -> None:
    answer = complete(ada, prompt=[5] * 600)
    assert answer.status == 400
    assert "600 tokens" in error(answer)["message"]
    assert "20,000 characters" in error(complete(ada, prompt="a" * 20_000))["message"]
    assert error(complete(ada, prompt=["a"] * 300))["param"] == "prompt"
    assert "vocabulary" in error(complete(ada, prompt=[10**6]))["message"]
    assert complete(ada, prompt=[10**30]).status == 400


def test_fields_without_effect_are_named_in_a_header(ada: Client) -> None:
    answer = complete(ada, user="me", metadata={"a": "b"}, store=False)
    assert answer.status == 200
    assert answer.headers["x-tinkex-ignored-fields"] == "user, metadata, store"
    assert "x-tinkex-ignored-fields" not in complete(ada).headers


@pytest.mark.parametrize("base", ["/v1", "/oai/api/v1"])
def test_both_base_urls_serve_with_either_form_of_the_key(ada: Client, base: str) -> None:
    anonymous = Client(ada.app)
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 1}
    assert complete(ada, f"{base}/completions").status == 200
    bearer = {"authorization": f"Bearer {ada.key}"}
    assert anonymous.call("POST", f"{base}/completions", body, bearer).status == 200
    for headers in ({}, {"authorization": "Bearer wrong"}):
        refused = anonymous.call("POST", f"{base}/completions", body, headers)
        assert refused.status == 401
        assert error(refused)["code"] == "invalid_api_key"
        assert ("bearer token" in error(refused)["message"]) == (not headers)
    for path in (f"{base}/responses", base):
        missing = ada.call("GET", path)
        assert missing.status == 404
        assert "no endpoint" in error(missing)["message"]


def save(client: Client, kind: str, name: str, run: str | None = None, seq_id: int = 1) -> str:
    run = run or client.create()
    call = {"weights": "save_weights", "sampler_weights": "save_weights_for_sampler"}[kind]
    path: str = client.result(client.post(call, {"model_id": run, "seq_id": seq_id, "path": name})).json[
        "path"
    ]
    return path


def test_models_are_base_models_and_checkpoints_of_both_kinds(ada: Client, bob: Client) -> None:
    paths = [save(ada, "sampler_weights", "s"), save(ada, "weights", "w")]
    listed = {entry["id"]: entry for entry in ada.call("GET", "/v1/models").json["data"]}
    assert {"tiny", *paths} <= set(listed)
    assert listed[paths[0]]["parent"] == "tiny"
    assert listed["tiny"]["max_model_len"] == 512
    assert ada.call("GET", "/v1/models/tiny:peft:64").json["max_model_len"] == 64
    assert (
        complete(ada, model="tiny:peft:64", max_tokens=400, temperature=0).json["usage"]["total_tokens"] <= 64
    )
    for name in ("tiny", *paths, f"tiny;{paths[0]}"):
        answer = complete(ada, model=name)
        assert answer.status == 200
        assert answer.json["model"] == name
        assert ada.call("GET", f"/v1/models/{name}").json["id"] == name
    assert not set(paths) & {entry["id"] for entry in bob.call("GET", "/v1/models").json["data"]}
    private = complete(bob, model=paths[0])
    assert private.status == 404
    assert error(private)["code"] == "model_not_found"
    run, _, checkpoint = paths[0].removeprefix("tinker://").partition("/")
    assert ada.post(f"training_runs/{run}/checkpoints/{checkpoint}/publish", b"").status == 200
    assert complete(bob, model=paths[0]).status == 200


@pytest.mark.parametrize("name", ["gpt-4", "", "tinker://run/sampler_weights/none", "tiny;tinker://x", ";"])
def test_unknown_models_are_errors(ada: Client, name: str) -> None:
    answer = complete(ada, model=name)
    assert answer.status in {400, 404}
    assert error(answer)["message"]
    assert error(answer)["param"] == "model"


async def test_a_client_that_disconnects_cancels_its_samples(ada: Client, engine: Engine) -> None:
    body = {"model": "tiny", "prompt": [PROMPT, PROMPT], "max_tokens": 400, "n": 4}
    for stream in (False, True):
        with engine.paused():
            await disconnect(ada, {**body, "stream": stream})
        while sum(engine.stats().operations.values()):  # noqa: ASYNC110 -- the engine is another thread
            await asyncio.sleep(0.01)


async def disconnect(client: Client, body: dict[str, Any]) -> None:
    """Sends a request, and goes away before its answer is complete."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    asked = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        asked.set()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        del message

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "root_path": "",
        "headers": [(b"authorization", f"Bearer {client.key}".encode())],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip
    await asyncio.wait_for(client.app(scope, receive, send), 60)
    assert asked.is_set()


@pytest.fixture(scope="module")
def roomy(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine with the limits of a server."""
    opened = Engine(EngineConfig(home=tmp_path_factory.mktemp("roomy"), models={"tiny": str(tiny_model)}))
    opened.start()
    opened.load_models().result()
    yield opened
    opened.close()


def longest_hold(engine: Engine, path: str = "/v1/completions", **fields: Any) -> tuple[Answer, float]:
    """An answer, and the longest CPU time for which its request kept the event loop from others: the best of three."""
    client = Client(build_app(engine), engine.api_key)
    body = json.dumps({"model": "tiny", "max_tokens": 1, **fields}, separators=(",", ":")).encode()

    async def measure() -> tuple[Answer, float]:
        sending = asyncio.create_task(client.acall("POST", path, body))
        longest, last = 0.0, time.thread_time()
        while not sending.done():
            await asyncio.sleep(0.001)
            now = time.thread_time()
            longest, last = max(longest, now - last), now
        return sending.result(), longest

    attempts = [asyncio.run(measure()) for _ in range(3)]
    return attempts[0][0], min(held for _, held in attempts)


def test_prompts_that_are_too_long_are_rejected_before_their_text_is_made(roomy: Engine) -> None:
    prompt = [5] * 400_000
    began = time.thread_time()
    text_of(roomy, prompt)
    cost = time.thread_time() - began
    answer, held = longest_hold(roomy, prompt=prompt)
    assert answer.status == 400
    assert error(answer)["param"] == "prompt"
    assert "400,000 tokens" in error(answer)["message"]
    assert held < cost, f"{held:.3f} s of {cost:.3f} s"


def test_many_prompts_are_tokenized_on_a_thread(roomy: Engine) -> None:
    prompt = "a b c d " * 500
    tokenizer = roomy.models.find("tiny").tokenizer
    began = time.thread_time()
    for _ in range(256):
        tokenizer.encode(prompt, add_special_tokens=True)
    cost = time.thread_time() - began
    answer, held = longest_hold(roomy, prompt=[prompt] * 255 + [""])  # the last one is rejected
    assert answer.status == 400
    assert held < cost / 2, f"{held:.3f} s of {cost:.3f} s"


def test_too_many_biases_are_rejected_before_they_are_converted(roomy: Engine) -> None:
    biases = {str(token): 1.0 for token in range(200_000)}
    began = time.thread_time()
    with pytest.raises(ValueError, match="logit_bias"):
        SamplingParams(logit_bias={int(token): bias for token, bias in biases.items()} | {-1: 1.0})
    cost = time.thread_time() - began
    answer, held = longest_hold(roomy, prompt="a", logit_bias=biases)
    assert answer.status == 400
    assert error(answer)["param"] == "logit_bias"
    assert held < cost, f"{held:.3f} s of {cost:.3f} s"


def test_the_names_of_many_tools_are_compared_in_linear_time(roomy: Engine) -> None:
    names = [f"f{number}" for number in range(6000)]
    began = time.thread_time()
    assert all(names.count(name) == 1 for name in names)
    cost = time.thread_time() - began
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    messages = [{"role": "user", "content": "Hi"}]
    answer, held = longest_hold(roomy, "/v1/chat/completions", messages=messages, tools=tools)
    assert error(answer)["param"] == "tools"
    assert "template" in error(answer)["message"]
    assert held < cost / 2, f"{held:.3f} s of {cost:.3f} s"
