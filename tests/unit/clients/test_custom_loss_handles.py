"""Losses made known to a session: uploaded once where the server runs them, run here where it does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.scripted import ScriptedServer
from tinkex import RequestFailedError, ServiceClient, types
from tinkex.testing import reply


def datum(*tokens: int, **more: Any) -> types.Datum:
    return types.Datum(types.ModelInput.from_ints(list(tokens)), {"target_tokens": list(tokens), **more})


def weighted(logprobs: Any, advantages: Any) -> Any:
    loss = -(logprobs * advantages).sum()
    return loss, {"custom/gain:sum": -loss, "custom/lp:mean": logprobs.mean()}


RANKS: dict[str, Any] = {"logprobs": 1, "advantages": 1}
DATA = [datum(1, 2, advantages=[1.0, 0.5]), datum(3, advantages=[2.0])]


@contextmanager
def connected(**answers: Any) -> Iterator[tuple[ScriptedServer, ServiceClient]]:
    server = ScriptedServer(**answers)
    with ServiceClient(transport=server.transport) as service:
        yield server, service


def runs_losses(value: Any, request: Any) -> Any:
    return reply({"custom_loss_server_side": True})


def known(server: ScriptedServer) -> Any:
    return lambda value, request: server.accept({"loss_id": f"loss-{value.custom_loss_seq_id}"})


def test_a_server_that_runs_losses_gets_the_graph_once_and_then_its_id() -> None:
    with connected(client_config=runs_losses) as (server, service):
        server.answers["create_custom_loss"] = known(server)
        training = service.create_lora_training_client("toy", rank=8)
        handle = service.create_custom_loss(weighted, RANKS).result(timeout=10)
        assert (handle.loss_id, handle.session_id, handle.name) == ("loss-0", "sess-1", "weighted")
        for _ in range(2):
            training.forward_backward_custom(DATA, handle).result(timeout=10)
    (uploaded,) = server.values("create_custom_loss")
    assert (uploaded.session_id, uploaded.name, uploaded.custom_loss_seq_id) == ("sess-1", "weighted", 0)
    assert [(one.name, one.rank) for one in uploaded.inputs] == [("logprobs", 1), ("advantages", 1)]
    passes = server.values("forward_backward")
    assert [(one.loss_fn, one.loss_fn_config, one.forward_only) for one in passes] == [
        ("custom", {"loss_id": "loss-0"}, False)
    ] * 2
    assert passes[0].data[0].loss_fn_inputs["advantages"].data == [1.0, 0.5]


def test_where_the_server_does_not_run_losses_the_graph_runs_here() -> None:
    with connected() as (server, service):
        training = service.create_lora_training_client("toy", rank=8)
        handle = service.create_custom_loss(weighted, RANKS).result(timeout=10)
        assert handle.loss_id is None
        output = training.forward_backward_custom(DATA, handle).result(timeout=10)
    assert "create_custom_loss" not in server.names()
    first, second = server.values("forward_backward")
    assert (first.forward_only, second.forward_only) == (True, False)
    assert second.loss_fn == "cross_entropy"
    assert [d.loss_fn_inputs["weights"].data for d in second.data] == [[1.0, 0.5], [2.0]]
    # the scripted logprobs are minus the tokens
    assert output.metrics["loss:sum"] == 8.0
    assert output.metrics["custom/gain:sum"] == -8.0
    assert output.metrics["custom/lp:mean"] == pytest.approx((-1.5 - 3.0) / 2)


async def test_the_async_form_uses_the_uploaded_loss_too() -> None:
    with connected(client_config=runs_losses) as (server, service):
        server.answers["create_custom_loss"] = known(server)
        training = await service.create_lora_training_client("toy", rank=8)
        handle = await service.create_custom_loss(weighted, RANKS)
        await (await training.forward_backward_custom_async(DATA, handle))
    assert [one.loss_fn for one in server.values("forward_backward")] == ["custom"]


@pytest.mark.parametrize("client_config", [runs_losses, lambda value, request: reply({})])
def test_a_session_creates_a_loss_once(client_config: Any) -> None:
    with connected(client_config=client_config) as (server, service):
        server.answers["create_custom_loss"] = known(server)
        service.create_custom_loss(weighted, RANKS).result(timeout=10)
        with pytest.raises(ValueError, match="has already created this loss"):
            service.create_custom_loss(weighted, RANKS).result(timeout=10)
    assert len(server.values("create_custom_loss")) <= 1


def test_a_loss_that_did_not_reach_the_server_can_be_created_again() -> None:
    with connected(client_config=runs_losses) as (server, service):
        rejected: list[int] = []

        def once(value: Any, request: Any) -> Any:
            if rejected:
                return server.accept({"loss_id": "loss-1"})
            rejected.append(value.custom_loss_seq_id)
            return server.accept({"error": "torch.frob is not allowed", "category": "user"})

        server.answers["create_custom_loss"] = once
        with pytest.raises(RequestFailedError, match="not allowed"):
            service.create_custom_loss(weighted, RANKS).result(timeout=10)
        assert service.create_custom_loss(weighted, RANKS).result(timeout=10).loss_id == "loss-1"
    assert [one.custom_loss_seq_id for one in server.values("create_custom_loss")] == [0, 1]


def test_an_invalid_function_is_rejected_before_anything_is_sent() -> None:
    with connected() as (server, service):
        with pytest.raises(ValueError, match="have logprobs as its first parameter"):
            service.create_custom_loss(lambda weights: (weights.sum(), {}), {"weights": 1})
        assert server.calls == []


def test_a_handle_of_another_session_is_rejected() -> None:
    with connected() as (_, service):
        handle = service.create_custom_loss(weighted, RANKS).result(timeout=10)
    with connected(create_session=lambda value, request: reply({"session_id": "sess-2"})) as (
        server,
        service,
    ):
        training = service.create_lora_training_client("toy", rank=8)
        with pytest.raises(ValueError, match="belongs to session sess-1, this run to sess-2"):
            training.forward_backward_custom(DATA, handle)
        assert server.values("forward_backward") == []


def test_data_that_does_not_match_the_loss_is_rejected_before_anything_is_sent() -> None:
    with connected() as (server, service):
        training = service.create_lora_training_client("toy", rank=8)
        handle = service.create_custom_loss(weighted, RANKS).result(timeout=10)
        with pytest.raises(ValueError, match=r"data\[0\] has no advantages"):
            training.forward_backward_custom([datum(1, 2)], handle)
        assert server.values("forward_backward") == []


def test_with_regularizers_the_loss_runs_here_even_where_the_server_could() -> None:
    from tinkex.losses.regularizers import L2, RegularizerSpec

    with connected(client_config=runs_losses) as (server, service):
        server.answers["create_custom_loss"] = known(server)
        training = service.create_lora_training_client("toy", rank=8)
        handle = service.create_custom_loss(weighted, RANKS).result(timeout=10)
        output = training.forward_backward_custom(
            DATA, handle, regularizers=[RegularizerSpec(L2(), weight=0.5)]
        ).result(timeout=10)
    assert [one.loss_fn for one in server.values("forward_backward")] == ["cross_entropy"] * 2
    # 8 of the loss, and half the squares of the scripted logprobs -1, -2 and -3
    assert output.metrics["loss:sum"] == 15.0
    assert output.metrics["base_loss:sum"] == 8.0
