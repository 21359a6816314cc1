"""What the proofs work with: a running engine with a tiny model, and requests that are right but for one field."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

from tests.unit.engine.api.asgi import PROTO, Answer, Client
from tinkex._wire import proto
from tinkex.engine.engine import Engine
from tinkex.types import (
    Datum,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ModelInput,
    SampleResponse,
)

__all__ = ["MODEL", "OTHER_MODEL", "TOKENS", "Rig", "Run", "datum", "refused"]

MODEL = "tiny"
OTHER_MODEL = "other"
TOKENS = [5, 60, 7, 80, 9, 100, 11, 120]
_numbers = count(1)


def refused(answer: Answer, words: str, *statuses: int) -> None:
    """The request was not accepted, and the answer says which part of it was wrong."""
    assert answer.status in (statuses or (400,)), (answer.status, answer.body)
    assert words in answer.detail, answer.detail


def datum(tokens: list[int] = TOKENS, **inputs: Any) -> Datum:
    """The next token of every position, unless ``inputs`` say otherwise."""
    return Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], **inputs})


@dataclass
class Rig:
    """An engine and two of its users."""

    engine: Engine
    ada: Client
    bob: Client

    @cached_property
    def base_sampler(self) -> str:
        """A sampler on the base model."""
        return self.sampler()

    def run(self, **lora: Any) -> Run:
        """A new run of Ada's."""
        return Run(self.ada, self.ada.create(**lora))

    def sampler(self, client: Client | None = None, **weights: Any) -> str:
        """A new sampler, on the base model by default."""
        client = client or self.ada
        request = {
            "session_id": client.session(),
            "sampling_session_seq_id": 0,
            **(weights or {"base_model": MODEL}),
        }
        answer = client.post("create_sampling_session", request)
        assert answer.status == 200, answer.body
        sampler_id: str = answer.json["sampling_session_id"]
        return sampler_id

    def sample_request(self, params: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
        """A request to sample that always gives the same tokens."""
        return {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]},
            "sampling_params": {"max_tokens": 6, "seed": 5, "stop": [], **(params or {})},
            "sampling_session_id": self.base_sampler,
            "seq_id": next(_numbers),
            **changes,
        }

    def submit_sample(self, params: dict[str, Any] | None = None, **changes: Any) -> Answer:
        """Hands the request in."""
        return self.ada.post("asample", self.sample_request(params, **changes))

    def sample(self, params: dict[str, Any] | None = None, **changes: Any) -> SampleResponse:
        """The request's result."""
        submitted = self.submit_sample(params, **changes)
        answer = self.ada.result(submitted, accept=PROTO)
        assert answer.headers["content-type"] == PROTO, answer.body
        return proto.decode_sample_response(answer.body, submitted.json["sample_sequence_ids"])

    def tokens(self, params: dict[str, Any] | None = None, **changes: Any) -> list[list[int]]:
        """The tokens of every sample."""
        return [sequence.tokens for sequence in self.sample(params, **changes).sequences]


@dataclass
class Run:
    """A run whose operations are numbered as they come."""

    client: Client
    run_id: str
    number: int = 0

    def body(self, **changes: Any) -> dict[str, Any]:
        """The part of a request that says whose turn it is."""
        turn = {"model_id": self.run_id, "seq_id": self.number + 1, **changes}
        if turn["model_id"] == self.run_id:  # a request for another run uses up no number of this one
            self.number = max(self.number, turn["seq_id"])
        return turn

    def submit_pass(
        self,
        data: list[Datum] | None = None,
        loss_fn: str = "cross_entropy",
        config: dict[str, Any] | None = None,
        *,
        forward_only: bool = False,
        **changes: Any,
    ) -> Answer:
        """Hands a pass in."""
        turn = self.body(**changes)
        request = ForwardBackwardRequest(
            turn["model_id"],
            turn["seq_id"],
            data or [datum()],
            loss_fn,  # type: ignore[arg-type]
            config,
            forward_only=forward_only,
        )
        return self.client.post(
            "forward_backward", proto.encode_forward_backward(request), content_type=PROTO
        )

    def output(self, *args: Any, **options: Any) -> ForwardBackwardOutput:
        """The result of a pass."""
        answer = self.client.result(self.submit_pass(*args, **options), accept=PROTO)
        assert answer.headers["content-type"] == PROTO, answer.body
        return proto.decode_forward_backward_output(answer.body)

    def loss(self, *args: Any, **options: Any) -> float:
        """The loss of a pass that trains nothing."""
        return self.output(*args, forward_only=True, **options).metrics["loss:sum"]

    def step(self, **adam: Any) -> dict[str, float]:
        """One optimizer step; returns its metrics."""
        answer = self.submit("optim_step", adam_params={"learning_rate": 0.01, **adam})
        metrics: dict[str, float] = self.client.result(answer).json["metrics"]
        return metrics

    def train(self, steps: int = 3, **adam: Any) -> float:
        """The loss after a few steps."""
        for _ in range(steps):
            self.output()
            self.step(**adam)
        return self.loss()

    def submit(self, name: str, **changes: Any) -> Answer:
        """Hands an operation in."""
        return self.client.post(name, self.body(**changes))

    def save(self, path: str = "saved", **changes: Any) -> str:
        """The path of a checkpoint of the present state."""
        answer = self.client.result(self.submit("save_weights", path=path, **changes)).json
        saved: str = answer["path"]
        return saved

    def info(self) -> dict[str, Any]:
        """The run as listings show it."""
        shown: dict[str, Any] = self.client.get(f"training_runs/{self.run_id}").json
        return shown

    def checkpoints(self) -> list[dict[str, Any]]:
        """The checkpoints of the run as listings show them."""
        listed: list[dict[str, Any]] = self.client.get(f"training_runs/{self.run_id}/checkpoints").json[
            "checkpoints"
        ]
        return listed
