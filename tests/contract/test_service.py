"""Sessions, listings and life cycle on every backend."""

from __future__ import annotations

import pytest

import tinkex
from tests.contract.backends import BASE_MODEL, Backend
from tinkex import types


def test_a_closed_client_raises_a_clear_error(backend: Backend) -> None:
    service = backend.service()
    service.get_server_capabilities()
    service.close("success").result(timeout=30)
    service.close("success").result(timeout=30)
    with pytest.raises(RuntimeError, match="closed"):
        service.create_sampling_client(base_model=BASE_MODEL)


def test_a_context_manager_closes(backend: Backend) -> None:
    with backend.service() as service:
        service.create_sampling_client(base_model=BASE_MODEL)
    with pytest.raises(tinkex.TinkerError, match="closed"):
        service.create_sampling_client(base_model=BASE_MODEL)


def test_runs_and_checkpoints_are_listed(service: tinkex.ServiceClient, backend: Backend) -> None:
    training = service.create_lora_training_client(BASE_MODEL, rank=4, user_metadata={"who": "me"})
    path = training.save_state("listed").result().path
    rest = backend.rest()
    run = rest.get_training_run(training.model_id).result(timeout=30)
    assert (run.base_model, run.lora_rank, run.is_lora, run.corrupted) == (BASE_MODEL, 4, True, False)
    assert run.user_metadata == {"who": "me"}
    checkpoints = rest.list_checkpoints(training.model_id).result(timeout=30).checkpoints
    assert [(c.checkpoint_id, c.tinker_path) for c in checkpoints] == [("weights/listed", path)]
    assert training.model_id in [
        r.training_run_id for r in rest.list_training_runs().result(timeout=30).training_runs
    ]
    rest.delete_checkpoint_from_tinker_path(path).result(timeout=30)
    assert rest.list_checkpoints(training.model_id).result(timeout=30).checkpoints == []


def test_deleted_weights_cannot_be_loaded(service: tinkex.ServiceClient, backend: Backend) -> None:
    training = service.create_lora_training_client(BASE_MODEL, rank=4)
    path = training.save_state("gone").result().path
    backend.rest().delete_checkpoint_from_tinker_path(path).result(timeout=30)
    with pytest.raises(tinkex.TinkerError, match="gone"):
        service.create_training_client_from_state(path)


def test_a_name_is_not_overwritten_by_default(service: tinkex.ServiceClient) -> None:
    training = service.create_lora_training_client(BASE_MODEL, rank=4)
    training.save_state("same").result()
    with pytest.raises(tinkex.TinkerError, match="overwrite"):
        training.save_state("same").result(timeout=60)
    training.save_state("same", overwrite=True).result(timeout=60)
    training.forward(
        [types.Datum(types.ModelInput.from_ints([5]), {"target_tokens": [6]})], "cross_entropy"
    ).result(timeout=60)


@pytest.mark.backends("server")
def test_a_wrong_key_is_an_authentication_error(backend: Backend) -> None:
    with pytest.raises(tinkex.AuthenticationError, match="401"):
        backend.service(api_key="tml-wrong").create_sampling_client(base_model=BASE_MODEL)
