"""A service without a model for the mock transport: it implements the protocol and makes up the numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from tests.contract.names import BASE_MODEL
from tinkex import types
from tinkex._wire import json, proto
from tinkex.testing import Reply, Request, reply

KEY = "tml-mock"


class MockService:
    """Answers every call the clients make; results are ready one loop turn after the submission."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}
        self.ranks: dict[str, int] = {}
        self.metadata: dict[str, dict[str, str] | None] = {}
        self.saved: dict[str, dict[str, types.Checkpoint]] = {}
        self.samplers: dict[str, str | None] = {}
        self.sessions: list[str] = []
        self.uploads: list[str] = []
        self.count = 0

    async def __call__(self, request: Request) -> Reply:
        await asyncio.sleep(0)
        path = request.path.removeprefix("/api/v1/")
        for prefix, handler in self.routes():
            if path == prefix or (prefix.endswith("/") and path.startswith(prefix)):
                return handler(request, path)
        raise AssertionError(f"no answer for {request.method} {request.path}")

    def routes(self) -> list[tuple[str, Callable[[Request, str], Reply]]]:
        return [
            ("client/config", lambda r, p: reply({"fwdbwd_max_chunk_len": 16})),
            ("client/dynamic_config", lambda r, p: reply({}, 404)),
            ("create_session", self.create_session),
            ("session_heartbeat", lambda r, p: reply({})),
            ("sessions/search", self.search),
            ("sessions", lambda r, p: reply({"sessions": self.page(r, self.sessions)})),
            ("sessions/", self.session),
            ("get_server_capabilities", lambda r, p: reply({"supported_models": [{"model_name": BASE_MODEL}]})),
            ("create_model", self.create_model),
            ("get_info", self.get_info),
            ("forward_backward", self.forward_backward),
            ("optim_step", lambda r, p: self.later({"metrics": {"grad_norm:mean": 1.0}})),
            ("save_weights", self.save),
            ("save_weights_for_sampler", self.save),
            ("load_weights", lambda r, p: self.later({"path": json.decode_any(r.body)["path"]})),
            ("weights_info", self.weights_info),
            ("create_sampling_session", self.create_sampler),
            ("samplers/", self.get_sampler),
            ("asample", self.sample),
            ("retrieve_future", self.retrieve),
            ("training_runs", self.runs),
            ("checkpoints", self.user_checkpoints),
            ("checkpoints/search", self.search_checkpoints),
            ("external_weights_upload_start", self.start_upload),
            ("external_weights_upload_finish", self.end_upload),
            ("external_weights_upload_cancel", self.end_upload),
            ("training_runs/", self.training_run),
        ]  # fmt: skip

    def new(self, kind: str) -> str:
        self.count += 1
        return f"{kind}-{self.count}"

    def create_session(self, request: Request, path: str) -> Reply:
        self.sessions.insert(0, self.new("session"))
        return reply({"session_id": self.sessions[0]})

    def session(self, request: Request, path: str) -> Reply:
        session_id = path.split("/")[1]
        if request.method == "GET":
            mine = [model_id for model_id in self.ranks if model_id.startswith(f"{session_id}:")]
            return reply({"training_run_ids": mine, "sampler_ids": list(self.samplers)})
        return reply({})

    def search(self, request: Request, path: str) -> Reply:
        query = json.decode(request.body, types.SessionSearchRequest)
        begin = 0 if query.cursor is None else self.sessions.index(query.cursor.last_session_id) + 1
        page = self.sessions[begin : begin + query.limit]
        now = datetime.now(UTC)
        found = [
            {"session_id": one, "created_at": now, "owner": "me", "project_id": "p", "checkpoints_count": 0}
            for one in page
        ]
        more = begin + query.limit < len(self.sessions)
        cursor = {"last_created_at": now, "last_session_id": page[-1]} if more else None
        return reply({"sessions": found, "next_cursor": cursor})

    def page(self, request: Request, items: list[Any]) -> list[Any]:
        begin = int(request.query["offset"])
        return items[begin : begin + int(request.query["limit"])]

    def runs(self, request: Request, path: str) -> Reply:
        page = self.page(request, [self.run(model_id) for model_id in reversed(self.ranks)])
        cursor = {"offset": int(request.query["offset"]), "limit": len(page), "total_count": len(self.ranks)}
        return reply({"training_runs": page, "cursor": cursor})

    def user_checkpoints(self, request: Request, path: str) -> Reply:
        everything = [one for saved in self.saved.values() for one in saved.values()]
        return reply({"checkpoints": self.page(request, everything)})

    def search_checkpoints(self, request: Request, path: str) -> Reply:
        query = json.decode(request.body, types.CheckpointSearchRequest)
        found = [one for saved in self.saved.values() for one in saved.values()]
        found = [one for one in found if query.checkpoint_type in {None, one.checkpoint_type}][::-1]
        places = [one.tinker_path for one in found]
        begin = 0 if query.cursor is None else places.index(query.cursor.last_checkpoint_uuid) + 1
        page = found[begin : begin + query.limit]
        more = begin + query.limit < len(found)
        cursor = (
            {"last_created_at": page[-1].time, "last_checkpoint_uuid": page[-1].tinker_path} if more else None
        )
        return reply({"checkpoints": page, "next_cursor": cursor})

    def start_upload(self, request: Request, path: str) -> Reply:
        json.decode(request.body, types.ExternalWeightsUploadStartRequest)
        self.uploads.append(self.new("upload"))
        names = ("adapter_config.json", "adapter_model.safetensors")
        urls = {name: f"http://mock/{name}" for name in names}
        return reply(
            {"upload_id": self.uploads[-1], "urls": urls, "expires": datetime.now(UTC) + timedelta(hours=1)}
        )

    def end_upload(self, request: Request, path: str) -> Reply:
        upload_id = json.decode_any(request.body)["upload_id"]
        if upload_id not in self.uploads:
            return reply({"detail": f"there is no upload {upload_id}"}, 404)
        self.uploads.remove(upload_id)
        return reply(
            {"tinker_path": f"tinker://{upload_id}/external_weights/uploaded"} if "finish" in path else {}
        )

    def later(self, result: Any, **more: Any) -> Reply:
        request_id = self.new("request")
        self.results[request_id] = result
        return reply({"request_id": request_id, **more})

    def retrieve(self, request: Request, path: str) -> Reply:
        return reply(self.results[json.decode_any(request.body)["request_id"]])

    def create_model(self, request: Request, path: str) -> Reply:
        body = json.decode(request.body, types.CreateModelRequest)
        if body.base_model != BASE_MODEL:
            return reply({"detail": f"unknown model {body.base_model!r}; served: {BASE_MODEL}"}, 404)
        model_id = f"{body.session_id}:train:{body.model_seq_id}"
        assert body.lora_config is not None
        self.ranks[model_id] = body.lora_config.rank
        self.metadata[model_id] = body.user_metadata
        self.saved[model_id] = {}
        return self.later({"model_id": model_id})

    def get_info(self, request: Request, path: str) -> Reply:
        model_id = json.decode_any(request.body)["model_id"]
        return reply({"model_id": model_id, "model_data": {"model_name": BASE_MODEL}, "is_lora": True, "lora_rank": self.ranks[model_id]})  # fmt: skip

    def forward_backward(self, request: Request, path: str) -> Reply:
        body = proto.decode_forward_backward(request.body)
        outputs = []
        for datum in body.data:
            targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
            outputs.append(
                {"logprobs": types.TensorData.from_numpy(np.full(targets.shape, -0.5, np.float32))}
            )
        loss = 0.5 * sum(o["logprobs"].array.size for o in outputs)
        return self.later(proto.encode_forward_backward_output(types.ForwardBackwardOutput("Mock", outputs, {"loss:sum": loss})))  # fmt: skip

    def save(self, request: Request, path: str) -> Reply:
        body = json.decode_any(request.body)
        run, name = body["model_id"], body.get("path")
        if name is None:
            sampler = self.new("sampler")
            self.samplers[sampler] = None
            return self.later({"sampling_session_id": sampler})
        kind = "weights" if path == "save_weights" else "sampler_weights"
        saved = f"tinker://{run}/{kind}/{name}"
        if saved in self.saved[run] and not body.get("overwrite"):
            return reply({"detail": f"{saved} exists; pass overwrite=True or another name"}, 400)
        self.saved[run][saved] = types.Checkpoint(
            checkpoint_id=f"{kind}/{name}",
            checkpoint_type="training" if kind == "weights" else "sampler",
            time=datetime.now(UTC),
            tinker_path=saved,
            user_metadata=body.get("user_metadata"),
        )
        return self.later({"path": saved})

    def weights_info(self, request: Request, path: str) -> Reply:
        tinker_path = json.decode_any(request.body)["tinker_path"]
        for run, saved in self.saved.items():
            if tinker_path in saved:
                return reply({"base_model": BASE_MODEL, "is_lora": True, "lora_rank": self.ranks[run]})
        return reply({"detail": f"no checkpoint {tinker_path}"}, 404)

    def create_sampler(self, request: Request, path: str) -> Reply:
        sampler = self.new("sampler")
        self.samplers[sampler] = json.decode_any(request.body).get("model_path")
        return reply({"sampling_session_id": sampler})

    def get_sampler(self, request: Request, path: str) -> Reply:
        return reply({"sampler_id": path.rpartition("/")[2], "base_model": BASE_MODEL})

    def sample(self, request: Request, path: str) -> Reply:
        body = json.decode(request.body, types.SampleRequest)
        n = body.sampling_params.max_tokens or 1
        ids = [self.new("sequence") for _ in range(body.num_samples)]
        prompt = np.full(body.prompt.length, -1.0, np.float32)
        prompt[:1] = np.nan
        response = types.SampleResponse(
            [types.SampledSequence("length", i, np.arange(n, dtype=np.int32), np.full(n, -0.5, np.float32)) for i in ids],
            prompt_logprobs_np=prompt if body.prompt_logprobs else None,
        )  # fmt: skip
        return self.later(proto.encode_sample_response(response), sample_sequence_ids=ids)

    def run(self, model_id: str) -> dict[str, Any]:
        return {
            "training_run_id": model_id,
            "base_model": BASE_MODEL,
            "model_owner": "me",
            "is_lora": True,
            "lora_rank": self.ranks[model_id],
            "last_request_time": datetime.now(UTC),
            "user_metadata": self.metadata[model_id],
        }

    def training_run(self, request: Request, path: str) -> Reply:
        _, model_id, *rest = path.split("/")
        if model_id not in self.ranks:
            return reply({"detail": f"no run {model_id}"}, 404)
        if not rest:
            return reply(self.run(model_id))
        saved = self.saved[model_id]
        if rest == ["checkpoints"]:
            return reply({"checkpoints": list(saved.values())})
        _, kind, name, *change = rest
        tinker_path = f"tinker://{model_id}/{kind}/{name}"
        if tinker_path not in saved:
            return reply({"detail": f"no checkpoint {tinker_path}"}, 404)
        if not change:
            del saved[tinker_path]
        elif change == ["publish"]:
            saved[tinker_path] = saved[tinker_path].model_copy(update={"public": request.method == "POST"})
        else:
            seconds = json.decode_any(request.body)["ttl_seconds"]
            expires = None if seconds is None else datetime.now(UTC) + timedelta(seconds=seconds)
            saved[tinker_path] = saved[tinker_path].model_copy(update={"expires_at": expires})
        return reply({})
