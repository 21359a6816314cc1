"""A Tinker server made of plain functions, for tests of the client: it accepts, remembers and answers."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl

import numpy as np

from tests.http_server import Handler, listening
from tinkex import types
from tinkex._wire import json, proto
from tinkex._wire.endpoints import ENDPOINTS, Endpoint
from tinkex.testing import MockTransport, Reply, Request, reply

Answer = Callable[[Any, Request], "Reply | Awaitable[Reply]"]


class ScriptedServer:
    """Answers every endpoint with something well-formed; pass functions by endpoint name to change that.

    ``calls`` holds (endpoint name, request value) in the order of arrival.
    """

    def __init__(self, **answers: Answer) -> None:
        self.answers = answers
        self.calls: list[tuple[str, Any]] = []
        self.results: dict[str, Reply] = {}
        self.transport = MockTransport(self.handle)

    def handle(self, request: Request) -> Reply | Awaitable[Reply]:
        endpoint = find_endpoint(request)
        value = decode(endpoint, request)
        self.calls.append((endpoint.name, value))
        answer = self.answers.get(endpoint.name) or getattr(self, f"on_{endpoint.name}")
        return answer(value, request)

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def values(self, name: str) -> list[Any]:
        return [value for called, value in self.calls if called == name]

    def accept(self, result: Any, **more: Any) -> Reply:
        """Takes an operation in; ``result`` is what polling for it will give."""
        request_id = f"req-{len(self.results)}"
        self.results[request_id] = result if isinstance(result, Reply) else reply(result)
        return reply({"request_id": request_id, **more})

    # ---- what it answers by itself ----

    def on_client_config(self, value: Any, request: Request) -> Reply:
        return reply({})

    def on_client_dynamic_config(self, value: Any, request: Request) -> Reply:
        return reply({"detail": "unknown"}, status=404)

    def on_create_session(self, value: Any, request: Request) -> Reply:
        return reply({"session_id": "sess-1"})

    def on_session_heartbeat(self, value: Any, request: Request) -> Reply:
        return reply({})

    def on_telemetry(self, value: Any, request: Request) -> Reply:
        return reply({"status": "accepted"})

    def on_finish_session(self, value: Any, request: Request) -> Reply:
        return reply({})

    def on_get_server_capabilities(self, value: Any, request: Request) -> Reply:
        return reply({"supported_models": [{"model_name": "toy"}]})

    def on_create_model(self, value: types.CreateModelRequest, request: Request) -> Reply:
        return self.accept({"model_id": f"{value.session_id}:train:{value.model_seq_id}"})

    def on_forward_backward(self, value: types.ForwardBackwardRequest, request: Request) -> Reply:
        return self.accept(reply(passed(value)))

    def on_optim_step(self, value: Any, request: Request) -> Reply:
        return self.accept({"metrics": {"grad_norm": 1.0}})

    def on_save_weights(self, value: types.SaveWeightsRequest, request: Request) -> Reply:
        return self.accept({"path": f"tinker://{value.model_id}/weights/{value.path}"})

    def on_save_weights_for_sampler(
        self, value: types.SaveWeightsForSamplerRequest, request: Request
    ) -> Reply:
        if value.path is None:
            return self.accept({"sampling_session_id": f"sess-1:sample:{value.sampling_session_seq_id}"})
        return self.accept({"path": f"tinker://{value.model_id}/sampler_weights/{value.path}"})

    def on_load_weights(self, value: types.LoadWeightsRequest, request: Request) -> Reply:
        return self.accept({"path": value.path, "model_id": value.model_id})

    def on_unload_model(self, value: types.UnloadModelRequest, request: Request) -> Reply:
        return self.accept({"model_id": value.model_id})

    def on_weights_info(self, value: Any, request: Request) -> Reply:
        return reply({"base_model": "toy", "is_lora": True, "lora_rank": 8, "train_mlp": False})

    def on_get_info(self, value: types.GetInfoRequest, request: Request) -> Reply:
        return reply({"model_data": {"model_name": "toy"}, "model_id": value.model_id, "lora_rank": 8})

    def on_create_sampling_session(
        self, value: types.CreateSamplingSessionRequest, request: Request
    ) -> Reply:
        return reply({"sampling_session_id": f"{value.session_id}:sample:{value.sampling_session_seq_id}"})

    def on_asample(self, value: types.SampleRequest, request: Request) -> Reply:
        ids = [f"seq-{value.seq_id}-{i}" for i in range(value.num_samples)]
        return self.accept(reply(sampled(value)), sample_sequence_ids=ids)

    def on_get_sampler(self, value: Any, request: Request) -> Reply:
        return reply({"sampler_id": request.path.rpartition("/")[2], "base_model": "toy"})

    def on_retrieve_future(self, value: types.FutureRetrieveRequest, request: Request) -> Reply:
        return self.results[value.request_id]

    def on_cancel_future(self, value: Any, request: Request) -> Reply:
        return reply({})


@contextmanager
def over_http(scripted: ScriptedServer) -> Iterator[str]:
    """Puts a scripted server behind a real socket; gives its address."""

    class ScriptHandler(Handler):
        disable_nagle_algorithm = True

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", "0")))
            path, _, query = self.path.partition("?")
            headers = {name.lower(): value for name, value in self.headers.items()}
            given = scripted.handle(Request(self.command, path, headers, body, dict(parse_qsl(query))))
            assert isinstance(given, Reply), "an async answer needs a loop"
            self.send_response(given.status)
            for name, value in given.headers.items():
                self.send_header(name, value)
            if self.close_connection:
                self.send_header("connection", "close")
            self.send_header("content-length", str(len(given.body)))
            self.end_headers()
            self.wfile.write(given.body)

        do_GET = do_POST = do_DELETE = answer

    with listening(ScriptHandler) as url:
        yield url


def passed(request: types.ForwardBackwardRequest) -> bytes:
    """The result of a pass: the logprob of every target is minus its token id."""
    outputs = [
        {"logprobs": types.TensorData.from_numpy(-d.model_input.to_numpy().astype(np.float32))}
        for d in request.data
    ]
    output = types.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=outputs,
        metrics={"loss:sum": float(sum(d.model_input.to_numpy().sum() for d in request.data))},
    )
    return proto.encode_forward_backward_output(output)


def sampled(request: types.SampleRequest) -> bytes:
    """The result of a sample: the prompt over again."""
    tokens = request.prompt.to_numpy()
    sequence = types.SampledSequence("stop", "", tokens, np.zeros(len(tokens), np.float32))
    prompt_logprobs = np.full(len(tokens), -0.5, np.float32)
    prompt_logprobs[0] = np.nan
    response = types.SampleResponse(
        [sequence] * request.num_samples,
        prompt_logprobs_np=prompt_logprobs if request.prompt_logprobs else None,
    )
    return proto.encode_sample_response(response)


def find_endpoint(request: Request) -> Endpoint:
    for endpoint in ENDPOINTS.values():
        pattern = re.sub(r"\{\w+:path\}", ".+", endpoint.path)
        pattern = re.sub(r"\{\w+\}", "[^/]+", pattern)
        if endpoint.method == request.method and re.fullmatch(pattern, request.path):
            return endpoint
    raise AssertionError(f"no endpoint {request.method} {request.path}")


def decode(endpoint: Endpoint, request: Request) -> Any:
    if endpoint.request is None:
        return None
    if endpoint.request_wire == "proto":
        body = request.body
        if request.headers.get("content-encoding") == "zstd":
            import zstandard

            body = zstandard.decompress(body)
        return proto.decode_forward_backward(body)
    return json.decode(request.body, endpoint.request)
