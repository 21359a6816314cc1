"""Finds what a client names, if it belongs to them; the errors say what to do instead.

Objects of other users look like objects that do not exist, so a stranger learns nothing from asking.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from tinkex.engine.integrity import CheckpointIntegrity
from tinkex.engine.served_models import ServedModels
from tinkex.engine.store import (
    MANIFEST_FILE,
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
    if row.status not in {RunStatus.LIVE, RunStatus.CREATING}:
        raise Expired(_why_ended(store, run_id, row.status))
    return row


def run_lost(store: Store, run_id: str) -> EngineError:
    """The error of accepted operations whose run is gone."""
    row = store.runs.get(run_id)
    return ModelUnavailable(_why_ended(store, run_id, row.status if row is not None else RunStatus.CORRUPTED))


def _why_ended(store: Store, run_id: str, status: RunStatus) -> str:
    if status is RunStatus.FAILED:
        return f"run {run_id} was never created: its create_model failed. Create a new run."
    if status is RunStatus.RELEASED:
        return f"run {run_id} was unloaded, or its session is over. {how_to_resume(store, run_id)}"
    return f"the server restarted, and what run {run_id} would be restored from is corrupt. {how_to_resume(store, run_id)}"


def how_to_resume(store: Store, run_id: str) -> str:
    """How to continue a run whose weights are gone, in one sentence."""
    last = store.checkpoints.last(run_id, CheckpointKind.WEIGHTS, time.time())
    if last is None:
        return "No checkpoint of it was saved: start a new run."
    return (
        "Continue from its last checkpoint: "
        f"service_client.create_training_client_from_state_with_optimizer({last.path!r})"
    )


def find_sampler(store: Store, owner: str, sampler_id: str) -> SamplerRow:
    """A sampler of this user that can still be used; looking it up is a use."""
    row = store.samplers.get(sampler_id)
    if row is None or row.owner != owner:
        raise UnknownObject(
            f"there is no sampling session {sampler_id!r} of yours; create one with create_sampling_client."
        )
    if row.model_path is None and row.directory is not None:
        if row.released_at is not None:
            raise Expired(
                f"the weights of sampling session {sampler_id} were deleted: its session ended, or newer ones of its run exist and "
                "it was not used for a while. Save weights again, or under a name (save_weights_for_sampler) to keep them."
            )
        store.samplers.mark_used(row.directory, time.time())
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
            f"there is no checkpoint {path} that you can read; list yours with RestClient().list_user_checkpoints()"
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
    """A sampler on a base model or on a checkpoint that this user may read; either may be ``<base>;<checkpoint>``."""
    base_model, model_path = split_model_name(base_model, model_path)
    directory = None
    if model_path is not None:
        checkpoint = find_checkpoint(store, owner, model_path)
        check_readable(store, checkpoint)
        integrity.check(checkpoint)
        if base_model is not None:
            check_same_base(models, base_model, checkpoint, model_path)
        base_model, directory = base_model or checkpoint.base_model, checkpoint.directory
    elif base_model is None:
        raise InvalidInput(
            "sampling needs a base_model or a model_path (tinker://<run>/sampler_weights/<name>)."
        )
    models.find_for_use(base_model)
    return SamplerRow(
        sampler_id=sampler_id,
        session_id=session_id,
        owner=owner,
        base_model=base_model,
        created_at=time.time(),
        model_path=model_path,
        directory=directory,
    )


def split_model_name(base_model: str | None, model_path: str | None) -> tuple[str | None, str | None]:
    """The base model and the checkpoint of a sampler, where one of the two names both: ``<base>;<checkpoint>``.

    >>> split_model_name("tiny:peft:128;tinker://run/sampler_weights/a", None)
    ('tiny:peft:128', 'tinker://run/sampler_weights/a')
    """
    for name, other in ((base_model, model_path), (model_path, base_model)):
        base, separator, path = (name or "").partition(";")
        if separator and path.startswith("tinker://"):
            if other is not None:
                raise InvalidInput(
                    f"{name!r} names a base model and a checkpoint; give it as base_model or as model_path, and leave out the other."
                )
            return base, path
    return base_model, model_path


def check_readable(store: Store, checkpoint: CheckpointRow) -> None:
    """Raise ``InvalidInput`` for weights that were exported: the server may not be able to decrypt them.

    Uploaded weights are external ones too, and have a manifest like other checkpoints.
    """
    if checkpoint.kind is not CheckpointKind.EXTERNAL_WEIGHTS:
        return
    if not (store.directories.resolve(checkpoint.directory) / MANIFEST_FILE).exists():
        raise InvalidInput(
            f"{checkpoint.path} was exported for use elsewhere; use what save_state or save_weights_for_sampler saved."
        )


def check_same_base(models: ServedModels, base_model: str, checkpoint: CheckpointRow, path: str) -> None:
    """Raise ``InvalidInput`` if a checkpoint was trained on another base model."""
    if models.find(checkpoint.base_model) is not models.find(base_model):
        raise InvalidInput(
            f"{path} was trained on {checkpoint.base_model}, which is another model than {base_model}."
        )


def sequence_ids(request_id: str, num_samples: int) -> list[str]:
    """The ids of the sequences a sample will return.

    >>> sequence_ids("req-1", 2)
    ['req-1:0', 'req-1:1']
    """
    return [f"{request_id}:{number}" for number in range(num_samples)]
