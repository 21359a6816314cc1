"""A loss for the server: the same graph, the same requests and the same rejections as the official client's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tinker
import torch
from tinker.lib.public_interfaces import custom_loss as official

import tinkex
from tests.rejected_losses import REJECTED
from tests.scripted import ScriptedServer, over_http
from tinkex.losses import traced as traced_loss
from tinkex.testing import reply

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)  # the official client leaves sockets to the garbage collector


def neg_ll(logprobs: Any, weights: Any) -> Any:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/neg_ll:sum": loss}


def ppo(logprobs: Any, old, advantages) -> Any:  # type: ignore[no-untyped-def]
    ratio = torch.exp(logprobs - old)
    clipped = ratio.clamp(0.8, 1.2)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    return -gain.sum(), {
        "custom/ratio:mean": ratio.mean(),
        "custom/clip_frac:mean": (ratio != clipped).float().mean(),
    }


def sliced(logprobs: Any, mask: Any) -> Any:
    tail = logprobs[1:, ..., None][::2]
    kept = torch.where(mask[1:] > 0, logprobs[1:], -math.inf)
    return torch.logsumexp(kept, dim=0) + tail.sum() * math.sqrt(2.0), {}


def typed(logprobs: Any) -> Any:
    wide = logprobs.to(dtype=torch.float64).reshape(-1, 1).T
    ones = torch.ones_like(wide, memory_format=torch.preserve_format)
    (mean,) = [torch.nn.functional.softplus(wide * ones).mean()]
    return mean + max([1, 2]) * logprobs.shape[0], {"custom/a.b/c-d:mean": mean}


def matrix(logprobs: Any, target: Any, scale: Any) -> Any:
    return -(target * logprobs).sum() * scale, {}


LOSSES: list[tuple[Any, dict[str, Any]]] = [
    (neg_ll, {"logprobs": 1, "weights": 1}),
    (ppo, {"logprobs": 1, "old": 1, "advantages": 1}),
    (sliced, {"logprobs": 1, "mask": 1}),
    (typed, {"logprobs": 1}),
    (matrix, {"logprobs": 2, "target": 2, "scale": 0}),
    (lambda logprobs: (logprobs.norm(p=math.inf), {}), {"logprobs": 1}),
]


@pytest.mark.parametrize(("fn", "ranks"), LOSSES, ids=lambda one: getattr(one, "__name__", ""))
def test_the_graph_is_the_official_one(fn: Any, ranks: dict[str, Any]) -> None:
    ours, theirs = traced_loss.trace_loss(fn, ranks, "s"), official.trace_loss(fn, ranks, "s")
    assert traced_loss.write_graph(ours).model_dump() == official.encode_graph(theirs).model_dump()
    assert (ours.name, ours.key, ours.input_names) == (theirs.name, theirs.key, theirs.input_names)
    assert repr(ours) == repr(theirs)


@pytest.mark.parametrize(("fn", "ranks", "_"), REJECTED)
def test_what_we_reject_the_official_client_rejects_with_the_same_kind_of_error(
    fn: Any, ranks: dict[str, Any], _: str
) -> None:
    with pytest.raises(ValueError):
        official.trace_loss(fn, ranks, "s")


def data(sdk: Any) -> list[Any]:
    return [
        sdk.Datum(
            model_input=sdk.ModelInput.from_ints([1, 2, 3]),
            loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 0.0, 0.5]},
        )
    ]


def program(sdk: Any, *, server_side: bool) -> tuple[ScriptedServer, dict[str, float], Any]:
    server = ScriptedServer(
        client_config=lambda value, request: reply({"custom_loss_server_side": server_side}),
        create_custom_loss=lambda value, request: server.accept({"loss_id": "loss-7"}),
    )
    with over_http(server) as url, sdk.ServiceClient(base_url=url, api_key="tml-x") as service:
        training = service.create_lora_training_client("toy", rank=8)
        handle = service.create_custom_loss(neg_ll, {"logprobs": 1, "weights": 1}).result()
        with pytest.raises(ValueError):
            service.create_custom_loss(neg_ll, {"logprobs": 1, "weights": 1}).result()
        with pytest.raises(ValueError):
            training.forward_backward_custom(
                [sdk.Datum(model_input=sdk.ModelInput.from_ints([1]), loss_fn_inputs={"target_tokens": [2]})],
                handle,
            ).result()
        metrics = training.forward_backward_custom(data(sdk), handle).result().metrics
    return server, metrics, handle


@pytest.mark.slow
@pytest.mark.parametrize("server_side", [True, False])
def test_the_requests_are_the_official_client_s(server_side: bool) -> None:
    our_server, our_metrics, ours = program(tinkex, server_side=server_side)
    their_server, their_metrics, theirs = program(tinker, server_side=server_side)
    for name in ("create_custom_loss", "forward_backward"):
        assert [_plain(v) for v in our_server.values(name)] == [_plain(v) for v in their_server.values(name)]
    assert len(our_server.values("create_custom_loss")) == server_side
    assert our_metrics == pytest.approx(their_metrics)
    assert (ours.loss_id, ours.session_id, ours.key) == (theirs.loss_id, theirs.session_id, theirs.key)


def _plain(value: Any) -> Any:
    if isinstance(value, tinkex.types.CreateCustomLossRequest):
        return value.model_dump()
    inputs = [
        {key: (t.tolist(), t.dtype, t.shape) for key, t in datum.loss_fn_inputs.items()}
        for datum in value.data
    ]
    return value.loss_fn, value.loss_fn_config, value.forward_only, value.seq_id, inputs
