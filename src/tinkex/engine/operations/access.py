"""Finding what a client names, if it belongs to them; the errors say what to do instead.

Things of other users look like things that do not exist: a stranger learns nothing from asking.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

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
from tinkex.types import ParsedCheckpointTinkerPath


def find_session(store: Store, owner: str, session_id: str) -> SessionRow:
    """A session of this user."""
    row = store.sessions.get(session_id)
    if row is None or row.owner != owner:
        raise UnknownObject(f"there is no session {session_id!r} of yours; make one with create_session.")
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
            f"the server restarted, and what run {run_id} would be restored from is damaged. {how_to_resume(store, run_id)}"
        )
    if row.status is RunStatus.RELEASED:
        raise Expired(f"run {run_id} was unloaded, or its session is over. {how_to_resume(store, run_id)}")
    if row.status is RunStatus.FAILED:
        raise Expired(f"run {run_id} was never created: its create_model failed. Create a new run.")
    return row


def how_to_resume(store: Store, run_id: str) -> str:
    """One sentence that says how to go on with a run whose weights are gone."""
    last = store.checkpoints.last(run_id, CheckpointKind.WEIGHTS, time.time())
    if last is None:
        return "No checkpoint of it was saved: start a new run."
    return (
        "Go on from its last checkpoint: "
        f"service_client.create_training_client_from_state_with_optimizer({last.path!r})"
    )


def lost(store: Store, run_id: str) -> EngineError:
    """What the promised operations of a run end with when the run is gone."""
    row = store.runs.get(run_id)
    if row is not None and row.status is RunStatus.FAILED:
        return ModelUnavailable(f"run {run_id} was never created: its create_model failed. Create a new run.")
    if row is not None and row.status is RunStatus.RELEASED:
        return ModelUnavailable(
            f"run {run_id} was unloaded, or its session is over. {how_to_resume(store, run_id)}"
        )
    return ModelUnavailable(
        f"the server restarted, and what run {run_id} would be restored from is damaged. {how_to_resume(store, run_id)}"
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
    """The path of the checkpoint that an address names.

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


def check_free(store: Store, run_id: str, kind: CheckpointKind, name: str, *, overwrite: bool) -> None:
    """Refuse to replace a live checkpoint unless asked to."""
    taken = store.checkpoints.get(run_id, kind, name)
    if taken is not None and not overwrite and not is_expired(taken):
        again = "save with overwrite=True, or " if kind is CheckpointKind.WEIGHTS else ""
        raise InvalidInput(f"{taken.path} exists already; {again}choose another name.")


def is_expired(row: CheckpointRow) -> bool:
    """Whether the time of a checkpoint is over."""
    return row.expires_at is not None and row.expires_at <= time.time()
