"""Finds what a client names, if it belongs to them; the errors say what to do instead.

Objects of other users look like objects that do not exist, so a stranger learns nothing from asking.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from tinkex.engine.integrity import CheckpointIntegrity
from tinkex.engine.served_models import ServedModel, ServedModels
from tinkex.engine.store import (
    CheckpointKind,
    CheckpointRow,
    RunRow,
    RunStatus,
    SamplerRow,
    SessionRow,
    Store,
)
from tinkex.errors import EngineError, Expired, InvalidInput, ModelUnavailable, UnknownObject
from tinkex.types import ParsedCheckpointTinkerPath, SampleRequest


def find_session(store: Store, owner: str, session_id: str) -> SessionRow:
    """A session of this user."""
    row = store.sessions.get(session_id)
    if row is None or row.owner != owner:
        raise UnknownObject(f"there is no session {session_id!r} of yours; create one with create_session.")
    return row


def find_run(store: Store, owner: str, run_id: str) -> RunRow:
    """A run of this user, in whatever state."""
    row = store.runs.get(run_id)
    if row is None or row.owner != owner:
        raise UnknownObject(
            f"there is no training run {run_id!r} of yours; list yours with RestClient().list_training_runs()"
        )
    return row


def find_accessible_run(store: Store, owner: str, run_id: str) -> RunRow:
    """A run of this user, or of another one who has published a checkpoint of it."""
    row = store.runs.get(run_id)
    if row is not None and row.owner != owner and store.runs.is_public(run_id, time.time()):
        return row
    return find_run(store, owner, run_id)


def find_live_run(store: Store, owner: str, run_id: str) -> RunRow:
    """A run of this user that can still be trained."""
    row = find_run(store, owner, run_id)
    if row.status is RunStatus.CORRUPTED:
        raise Expired(
            f"the server restarted, and what run {run_id} would be restored from is corrupt. {how_to_resume(store, run_id)}"
        )
    if row.status is RunStatus.RELEASED:
        raise Expired(f"run {run_id} was unloaded, or its session is over. {how_to_resume(store, run_id)}")
    if row.status is RunStatus.FAILED:
        raise Expired(f"run {run_id} was never created: its create_model failed. Create a new run.")
    return row


def how_to_resume(store: Store, run_id: str) -> str:
    """How to continue a run whose weights are gone, in one sentence."""
    last = store.checkpoints.last(run_id, CheckpointKind.WEIGHTS, time.time())
    if last is None:
        return "No checkpoint of it was saved: start a new run."
    return (
        "Continue from its last checkpoint: "
        f"service_client.create_training_client_from_state_with_optimizer({last.path!r})"
    )


def run_lost(store: Store, run_id: str) -> EngineError:
    """The error of accepted operations whose run is gone."""
    row = store.runs.get(run_id)
    if row is not None and row.status is RunStatus.FAILED:
        return ModelUnavailable(f"run {run_id} was never created: its create_model failed. Create a new run.")
    if row is not None and row.status is RunStatus.RELEASED:
        return ModelUnavailable(
            f"run {run_id} was unloaded, or its session is over. {how_to_resume(store, run_id)}"
        )
    return ModelUnavailable(
        f"the server restarted, and what run {run_id} would be restored from is corrupt. {how_to_resume(store, run_id)}"
    )


def find_sampler(store: Store, owner: str, sampler_id: str) -> SamplerRow:
    """A sampler of this user that can still be used."""
    row = store.samplers.get(sampler_id)
    if row is None or row.owner != owner:
        raise UnknownObject(
            f"there is no sampling session {sampler_id!r} of yours; create one with create_sampling_client."
        )
    if row.released_at is not None and row.model_path is None and row.directory is not None:
        raise Expired(
            f"the weights of sampling session {sampler_id} were released when its session ended; keep weights under a "
            "name with save_weights_for_sampler to sample from them later."
        )
    return row


def checkpoint_of_url(parameters: Mapping[str, str]) -> str:
    """The path of the checkpoint that a URL names.

    >>> checkpoint_of_url({"training_run_id": "s:train:0", "checkpoint_id": "weights/0001"})
    'tinker://s:train:0/weights/0001'
    """
    return f"tinker://{parameters['training_run_id']}/{parameters['checkpoint_id']}"


def find_checkpoint(store: Store, owner: str, path: str, granted: str | None = None) -> CheckpointRow:
    """The live checkpoint of a path, if this user, or the account that granted them access, may read it."""
    try:
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    except ValueError as error:
        raise InvalidInput(str(error)) from error
    kind, name = parsed.checkpoint_id.split("/")
    row = store.checkpoints.get(parsed.training_run_id, kind, name)
    if row is None or not (row.public or row.owner in {owner, granted}):
        raise UnknownObject(
            f"there is no checkpoint {path} that this key can see; list yours with RestClient().list_user_checkpoints()"
        )
    if is_expired(row):
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(row.expires_at))
        raise Expired(
            f"checkpoint {path} expired on {when}; list live ones with RestClient().list_checkpoints({row.run_id!r})"
        )
    return row


def check_name_is_free(
    store: Store, run_id: str, kind: CheckpointKind, name: str, *, overwrite: bool
) -> None:
    """Raise ``InvalidInput`` if a live checkpoint would be replaced that the request does not mean to overwrite."""
    taken = store.checkpoints.get(run_id, kind, name)
    if taken is not None and not overwrite and not is_expired(taken):
        again = "save with overwrite=True, or " if kind is CheckpointKind.WEIGHTS else ""
        raise InvalidInput(f"{taken.path} exists already; {again}choose another name.")


def is_expired(row: CheckpointRow) -> bool:
    """Whether the TTL of a checkpoint has passed."""
    return row.expires_at is not None and row.expires_at <= time.time()


def resolve_sampler(
    store: Store, models: ServedModels, integrity: CheckpointIntegrity, owner: str, request: SampleRequest
) -> SamplerRow:
    """The sampler that a request names, or a temporary one for a request that names weights itself."""
    if request.sampling_session_id is not None:
        return find_sampler(store, owner, request.sampling_session_id)
    return new_sampler(
        store, models, integrity, owner, f"direct:{owner}", "", request.base_model, request.model_path
    )


def new_sampler(
    store: Store,
    models: ServedModels,
    integrity: CheckpointIntegrity,
    owner: str,
    sampler_id: str,
    session_id: str,
    base_model: str | None,
    model_path: str | None,
) -> SamplerRow:
    """A sampler on a base model or on a checkpoint that this user may read."""
    directory = None
    if model_path is not None:
        checkpoint = find_checkpoint(store, owner, model_path)
        if checkpoint.kind is CheckpointKind.EXTERNAL_WEIGHTS:
            raise InvalidInput(f"{model_path} was exported for use elsewhere; sample from sampler_weights.")
        integrity.check(checkpoint)
        if base_model is not None:
            check_same_base(models, models.find(base_model), checkpoint, model_path)
        base_model, directory = base_model or checkpoint.base_model, checkpoint.directory
    elif base_model is None:
        raise InvalidInput(
            "sampling needs a base_model or a model_path (tinker://<run>/sampler_weights/<name>)."
        )
    models.find(base_model)
    return SamplerRow(
        sampler_id=sampler_id,
        session_id=session_id,
        owner=owner,
        base_model=base_model,
        created_at=time.time(),
        model_path=model_path,
        directory=directory,
    )


def check_same_base(models: ServedModels, model: ServedModel, checkpoint: CheckpointRow, path: str) -> None:
    """Raise ``InvalidInput`` if a checkpoint was trained on another base model."""
    if models.find(checkpoint.base_model) is not model:
        raise InvalidInput(
            f"{path} was trained on {checkpoint.base_model}, which is another model than {model.source}."
        )


def sequence_ids(request_id: str, num_samples: int) -> list[str]:
    """The ids of the sequences a sample will return.

    >>> sequence_ids("req-1", 2)
    ['req-1:0', 'req-1:1']
    """
    return [f"{request_id}:{number}" for number in range(num_samples)]
