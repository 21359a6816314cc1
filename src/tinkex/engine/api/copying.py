"""Copying checkpoints, and reading another account's checkpoints with its credential."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import msgspec

from tinkex.engine.api.auth import find_key
from tinkex.engine.api.call import Call, Handler, Reply
from tinkex.engine.intake.copies import copy_checkpoint
from tinkex.engine.lookup import find_checkpoint
from tinkex.engine.quotas import Quotas
from tinkex.errors import NotAllowed
from tinkex.types import CopyWeightsResponse, LoadWeightsRequest

TOKEN_HEADER = "x-tinker-weights-access-token"  # noqa: S105 -- the name of a header


async def copy_weights(call: Call) -> Reply:
    """Copy a checkpoint of the user, a public one, or one of the account whose credential is sent along."""
    token = call.headers.get(TOKEN_HEADER) or call.request.weights_access_token
    store = call.engine.store
    source = find_checkpoint(store, call.owner, call.request.source_path, granted_by(call, token))
    call.engine.integrity.check(source)
    quotas = Quotas(call.engine.config, store)
    quotas.check_room(call.owner, source.size_bytes)
    key = call.headers.get("x-idempotency-key")
    copy = await call.run_on_thread(
        partial(copy_checkpoint, store, quotas, call.owner, source, call.request, key)
    )
    await call.engine.flushed()
    return CopyWeightsResponse(tinker_path=copy.path)


def granted_by(call: Call, token: str | None) -> str | None:
    """Returns the account whose checkpoints a weights access token (its API key, or a token for one) may read."""
    if token is None:
        return None
    if not call.engine.config.auth:
        return call.owner
    key = find_key(call.engine, token)
    if key is None:
        raise NotAllowed(
            "the weights_access_token is not valid on this server; it must be a key of the other account."
        )
    return key.user_id


def with_grant(call: Call, request: LoadWeightsRequest) -> LoadWeightsRequest:
    """Returns the request as it is recorded: with the granting account in place of its secret."""
    granted = granted_by(call, request.weights_access_token)
    return msgspec.structs.replace(request, weights_access_token=granted)


HANDLERS: Mapping[str, Handler] = {"copy_weights": copy_weights}
