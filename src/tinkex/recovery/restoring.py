"""Restarts a run: lists its checkpoints, and creates a new run from one."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tinkex._runtime import run_in_daemon_thread
from tinkex._transport.retry import GiveUp
from tinkex.errors import APIStatusError, RecoveryError, RequestFailedError
from tinkex.recovery.diagnosis import outcome_of, says_gone
from tinkex.recovery.policy import Best, RecoveryPolicy, newest_first, rank_checkpoints
from tinkex.types import Checkpoint

if TYPE_CHECKING:
    from tinkex.clients.rest import RestClient
    from tinkex.clients.service import ServiceClient
    from tinkex.clients.training import TrainingClient

__all__ = ["call_user_function", "checkpoints_of", "paths_for", "restore_first"]


async def call_user_function(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a user's function, sync or async, on a thread where it may block; returns its result."""

    def call() -> Any:
        returned = function(*arguments)
        return asyncio.run(_awaited(returned)) if inspect.isawaitable(returned) else returned

    return await run_in_daemon_thread(call)


async def checkpoints_of(rest: RestClient, run_id: str, known: Sequence[Checkpoint] = ()) -> list[Checkpoint]:
    """Returns the training checkpoints of a run, newest first; the ``known`` ones if the server has lost it."""
    try:
        listed: Sequence[Checkpoint] = (await rest.list_checkpoints_async(run_id)).checkpoints
    except APIStatusError as error:
        if not says_gone(error):
            raise
        listed = known
    return newest_first(listed)


async def paths_for(policy: RecoveryPolicy, run_id: str, checkpoints: Sequence[Checkpoint]) -> list[str]:
    """Returns the checkpoints to restart from by the policy, in order of preference."""
    choice = policy.checkpoint
    if isinstance(choice, str | Best):
        return rank_checkpoints(choice, run_id, checkpoints)
    try:
        picked = await call_user_function(choice, run_id, list(checkpoints))
    except (Exception, SystemExit) as error:
        raise RecoveryError(
            f"the checkpoint function for run {run_id} raised {type(error).__name__}: {error}",
            run_id,
        ) from error
    path = picked.tinker_path if isinstance(picked, Checkpoint) else picked
    if not isinstance(path, str):
        raise RecoveryError(
            f"the checkpoint function for run {run_id} returned {picked!r}; it must return one of its arguments, or a "
            "tinker:// path",
            run_id,
        )
    return [path]


async def restore_first(
    service: ServiceClient,
    run_id: str,
    paths: Sequence[str],
    *,
    optimizer: bool,
    user_metadata: Mapping[str, str] | None = None,
    on_attempt: Callable[[str], None],
) -> tuple[TrainingClient, str]:
    """Creates a new run from the first of these checkpoints that can be loaded; returns it and the path.

    ``on_attempt`` is called with every path before it is tried.
    """
    rejections: list[Exception] = []
    make = (
        service.create_training_client_from_state_with_optimizer_async
        if optimizer
        else service.create_training_client_from_state_async
    )
    for path in paths:
        on_attempt(path)
        try:
            return await make(path, user_metadata=user_metadata), path
        except (APIStatusError, RequestFailedError, ValueError) as error:
            if not _is_checkpoint_error(error):
                raise
            rejections.append(error)
    tried = "; ".join(f"{path}: {error}" for path, error in zip(paths, rejections, strict=True))
    raise RecoveryError(f"no checkpoint of run {run_id} can be loaded ({tried})", run_id) from rejections[-1]


def _is_checkpoint_error(error: Exception) -> bool:
    """Returns whether the error is specific to the checkpoint, so that another one may load."""
    if isinstance(error, APIStatusError):
        return error.status_code in {400, 404, 410, 422}
    return isinstance(outcome_of(error), GiveUp)


async def _awaited(value: Any) -> Any:
    return await value
