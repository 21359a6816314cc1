"""Calls by path and results by id, on the engine in this process and on a server."""

from __future__ import annotations

import pytest

import tinkex
from tests.contract.backends import BASE_MODEL, WITH_A_MODEL
from tinkex import types

pytestmark = pytest.mark.backends(*WITH_A_MODEL)


async def test_an_operation_that_is_submitted_by_path_is_polled_by_its_id(
    service: tinkex.ServiceClient,
) -> None:
    rest = service.create_rest_client()
    run = (await service.create_lora_training_client(BASE_MODEL, rank=2)).model_id
    request = {"model_id": run, "path": "by-hand", "seq_id": 1, "type": "save_weights"}
    accepted = await rest.post_async("/api/v1/save_weights", request)
    saved = await service.poll_async(accepted["request_id"], types.SaveWeightsResponse)
    assert saved.path == f"tinker://{run}/weights/by-hand"
    plain = service.poll(accepted["request_id"]).result()
    assert types.parse_future_response(plain) == types.FutureCompletedResponse(result=plain)
    assert plain["path"] == saved.path

    listed = rest.list_checkpoints(run).result().checkpoints[0]
    assert listed.training_run_id == run
    by_id = rest.get_checkpoint_archive_url(run, listed.checkpoint_id).result()
    by_path = rest.get(f"/api/v1/training_runs/{run}/checkpoints/{listed.checkpoint_id}/archive").result()
    assert by_id.url.rpartition("/")[2].startswith("by-hand.tar")
    assert (by_path["status"], by_path["url"].partition("?")[0].rpartition("/")[2]) == (
        302,
        by_id.url.partition("?")[0].rpartition("/")[2],
    )
    rest.delete(f"/api/v1/training_runs/{run}/checkpoints/{listed.checkpoint_id}").result()
    assert rest.list_checkpoints(run).result().checkpoints == []


def test_samples_and_passes_are_polled_by_their_id(service: tinkex.ServiceClient) -> None:
    rest = service.create_rest_client()
    training = service.create_lora_training_client(BASE_MODEL, rank=2)
    data = [
        {
            "model_input": {"chunks": [{"tokens": [5, 6], "type": "encoded_text"}]},
            "loss_fn_inputs": {"target_tokens": {"data": [6, 7], "dtype": "int64"}},
        }
    ]
    forward = {"forward_input": {"data": data, "loss_fn": "cross_entropy"}, "seq_id": 1}
    request_id = rest.post("/api/v1/forward", {"model_id": training.model_id, **forward}).result()[
        "request_id"
    ]
    output = service.poll(request_id, types.ForwardBackwardOutput).result()
    assert output.loss == pytest.approx(-sum(output.loss_fn_outputs[0]["logprobs"].data), rel=1e-5)
    assert service.poll(request_id).result()["metrics"]["loss:sum"] == pytest.approx(output.loss)


def test_errors_of_calls_by_path_are_typed(service: tinkex.ServiceClient) -> None:
    rest = service.create_rest_client()
    assert rest.get("/api/v1/healthz").result()["status"] == "ok"
    with pytest.raises(tinkex.NotFoundError, match="no endpoint GET /api/v1/nothing"):
        rest.get("/api/v1/nothing").result()
    with pytest.raises(tinkex.NotFoundError, match="no request 'unknown'"):
        service.poll("unknown").result()
    run = service.create_lora_training_client(BASE_MODEL, rank=2).model_id
    datum = {
        "model_input": {"chunks": [{"tokens": [5], "type": "encoded_text"}]},
        "loss_fn_inputs": {"target_tokens": {"data": [6], "dtype": "int64"}},
    }
    wrong = {"model_id": run, "seq_id": 1, "forward_input": {"data": [datum], "loss_fn": "sorrow"}}
    with pytest.raises(tinkex.BadRequestError, match="loss_fn 'sorrow' does not exist"):
        rest.post("/api/v1/forward", wrong).result()


def test_the_context_length_is_known_before_the_weights_are_loaded(service: tinkex.ServiceClient) -> None:
    (model,) = service.get_server_capabilities().supported_models
    assert (model.model_name, model.max_context_length, model.arch) == (BASE_MODEL, 512, "llama")
