"""Random programs: operations of several runs of one session, determined by a seed.

A program is a list of operations for each of its runs. Operations of a run are numbered; samples are not, they wait for
the weights they are drawn from. The bodies are those of our client, of the official one or of clients before protobuf.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any, Literal

from tinkex import types
from tinkex._wire import proto

PROTO, JSON = "application/x-protobuf", "application/json"
Dialect = Literal["tinkex", "tinker", "json"]
DIALECTS: tuple[Dialect, ...] = ("tinkex", "tinker", "json")

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
KINDS = {
    "pass": 30,
    "chunks": 6,
    "step": 24,
    "forward": 6,
    "save": 6,
    "sampler": 4,
    "snapshot": 4,
    "load": 5,
    "sample": 10,
    "overflow": 2,
    "bad": 3,
}
VOCABULARY = 500
PROMPTS = ([], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20], [11, 12, 13, 14, 15, 16, 17, 18, 30, 31, 32, 33])
"""Datums of a pass begin with one of these, so that those of a pass, and of passes in one turn, share prefixes."""
ORIGIN = 1
"""The seq_id of every run's first save."""


@dataclass(frozen=True)
class Step:
    """One operation: ``number`` is its seq_id, ``draw`` seeds its content, ``after`` is the operation it waits for."""

    place: int
    kind: str
    number: int
    draw: int
    after: int | None = None
    """The position of the save this one loads or samples from; None means the initial state."""


@dataclass(frozen=True)
class Run:
    place: int
    rank: int
    seed: int
    steps: tuple[Step, ...]

    @property
    def ends_at(self) -> int:
        """The seq_id after its last."""
        return self.steps[-1].number + 1


@dataclass(frozen=True)
class Program:
    seed: int
    dialect: Dialect
    runs: tuple[Run, ...]
    window: int
    """How many operations of a run are in flight, in any order."""
    num_steps: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_steps", sum(len(run.steps) for run in self.runs))


def make_program(seed: int, length: int = 24) -> Program:
    """Returns the program of a seed: two or three runs with about ``length`` operations each."""
    rng = random.Random(seed)
    runs = tuple(
        Run(place, rng.randint(1, 6), rng.randrange(1000), _steps(rng, length))
        for place in range(rng.choice((2, 2, 3)))
    )
    return Program(seed, DIALECTS[seed % len(DIALECTS)], runs, window=rng.choice((1, 3, 6)))


def _steps(rng: random.Random, length: int) -> tuple[Step, ...]:
    steps: list[Step] = []
    number = ORIGIN

    def add(kind: str, after: int | None = None) -> None:
        nonlocal number
        number += kind != "sample"
        steps.append(Step(len(steps), kind, number, rng.randrange(1 << 30), after))

    def saved(*kinds: str) -> int | None:
        return rng.choice([None, *(step.place for step in steps if step.kind in kinds)])

    while len(steps) < length:
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        if kind == "chunks":  # one pass of a client, split into chunks
            for _ in range(rng.randint(2, 4)):
                add("pass")
        elif kind == "load":
            add(kind, saved("save"))
        elif kind == "sample":
            add(kind, saved("sampler", "snapshot"))
        else:
            add(kind)
    return tuple(steps)


# ---- bodies


@dataclass(frozen=True)
class Body:
    endpoint: str
    content: bytes
    content_type: str = JSON


def pass_body(dialect: Dialect, run_id: str, step: Step) -> Body:
    """A pass over a few sequences with a random loss; a ``bad`` one has a token outside the vocabulary."""
    rng = random.Random(step.draw)
    loss = rng.choice(LOSSES) if step.kind in {"pass", "forward"} else "cross_entropy"
    if step.kind == "overflow":
        loss = "importance_sampling"
    prompt = rng.choice(PROMPTS)
    data = [_datum(rng, loss, step.kind, prompt) for _ in range(rng.randint(1, 3))]
    forward_only = step.kind == "forward"
    match dialect:
        case "tinkex":
            request = types.ForwardBackwardRequest(
                model_id=run_id,
                seq_id=step.number,
                data=[_our_datum(tokens, inputs) for tokens, inputs in data],
                loss_fn=loss,
                forward_only=forward_only,
            )
            return Body("forward_backward", proto.encode_forward_backward(request), PROTO)
        case "tinker":
            return Body(
                "forward_backward", _official_pass(run_id, step.number, data, loss, forward_only), PROTO
            )
        case "json":
            given = {"data": [_json_datum(tokens, inputs) for tokens, inputs in data], "loss_fn": loss}
            name = "forward" if forward_only else "forward_backward"
            return Body(name, _json({"model_id": run_id, "seq_id": step.number, f"{name}_input": given}))


Inputs = dict[str, list[float] | list[int]]


def _datum(rng: random.Random, loss: str, kind: str, prompt: list[int]) -> tuple[list[int], Inputs]:
    tokens = [*prompt, *(rng.randrange(5, VOCABULARY) for _ in range(rng.randint(4, 15)))]
    length = len(tokens) - 1
    inputs: Inputs = {"target_tokens": tokens[1:]}
    if loss == "cross_entropy":
        inputs["weights"] = [rng.choice((0.0, 0.5, 1.0)) for _ in range(length)]
    else:
        # Tiny probabilities make the ratio overflow: the operation fails, and changes nothing.
        inputs["logprobs"] = [-3e38 if kind == "overflow" else rng.uniform(-8.0, -4.0) for _ in range(length)]
        inputs["advantages"] = [rng.uniform(-1.0, 1.0) for _ in range(length)]
    if loss == "gspo":
        inputs["sequence_ratio_mask"] = [1.0] * length
    if kind == "bad":
        tokens[0] = 1_000_000
    return tokens[:-1], inputs


def _our_datum(tokens: list[int], inputs: Inputs) -> types.Datum:
    return types.Datum(types.ModelInput.from_ints(tokens), {**inputs})


def _json_datum(tokens: list[int], inputs: Inputs) -> dict[str, Any]:
    return {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
        "loss_fn_inputs": {
            name: {
                "data": values,
                "dtype": "int64" if name == "target_tokens" else "float32",
                "shape": [len(values)],
            }
            for name, values in inputs.items()
        },
    }


def _official_pass(
    run_id: str, number: int, data: list[tuple[list[int], Inputs]], loss: str, forward_only: bool
) -> bytes:
    from tinker import types as official
    from tinker.proto.request_conv import forward_backward_request_to_proto

    datums = [
        official.Datum(model_input=official.ModelInput.from_ints(tokens), loss_fn_inputs={**inputs})  # type: ignore[dict-item]
        for tokens, inputs in data
    ]
    request = official.ForwardBackwardRequest(
        forward_backward_input=official.ForwardBackwardInput(data=datums, loss_fn=loss),  # type: ignore[arg-type]
        model_id=run_id,
        seq_id=number,
    )
    message = forward_backward_request_to_proto(request)
    message.forward_only = forward_only
    return bytes(message.SerializeToString())


def step_body(run_id: str, step: Step) -> Body:
    rng = random.Random(step.draw)
    adam = {
        "learning_rate": rng.choice((1e-3, 1e-2)),
        "beta1": rng.choice((0.9, 0.8)),
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": rng.choice((0.0, 0.01)),
        "grad_clip_norm": rng.choice((0.0, 1.0)),
    }
    content = {"model_id": run_id, "seq_id": step.number, "adam_params": adam, "type": "optim_step"}
    return Body("optim_step", _json(content))


def save_body(run_id: str, number: int, name: str) -> Body:
    content = {
        "model_id": run_id,
        "path": name,
        "seq_id": number,
        "overwrite": False,
        "type": "save_weights",
    }
    return Body("save_weights", _json(content))


def sampler_body(run_id: str, step: Step, sampling_session_seq_id: int | None) -> Body:
    """Weights for sampling: a named checkpoint, or an unnamed snapshot with the number of its sampler."""
    content = {"model_id": run_id, "seq_id": step.number, "type": "save_weights_for_sampler"}
    if sampling_session_seq_id is None:
        content["path"] = f"s{step.number}"
    else:
        content["sampling_session_seq_id"] = sampling_session_seq_id
    return Body("save_weights_for_sampler", _json(content))


def load_body(run_id: str, step: Step, path: str) -> Body:
    with_optimizer = bool(step.draw % 2)
    content = {"model_id": run_id, "seq_id": step.number, "path": path, "optimizer": with_optimizer}
    return Body("load_weights", _json(content))


def sample_body(sampler_id: str, number: int, draw: int) -> Body:
    rng = random.Random(draw)
    tokens = [rng.randrange(5, VOCABULARY) for _ in range(rng.randint(2, 10))]
    params = {
        "max_tokens": rng.randint(1, 24),
        "seed": draw,
        "temperature": rng.choice((0.0, 0.7, 1.0)),
        "top_k": rng.choice((-1, 20)),
        "top_p": rng.choice((1.0, 0.9)),
        "stop": [],
    }
    content = {
        "sampling_session_id": sampler_id,
        "seq_id": number,
        "num_samples": rng.randint(1, 3),
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
        "sampling_params": params,
        "prompt_logprobs": rng.random() < 0.3,
        "type": "sample",
    }
    return Body("asample", _json(content))


def _json(content: object) -> bytes:
    return json.dumps(content).encode()
