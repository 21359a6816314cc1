"""Copying checkpoints, and reading those of another account with a credential of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from tinkex.engine.api.auth import key_of
from tinkex.engine.api.call import Call, Handler, Reply
from tinkex.engine.intake.copies import copy_checkpoint
from tinkex.engine.lookup import find_checkpoint
from tinkex.engine.quotas import Quotas
from tinkex.errors import NotAllowed
from tinkex.types import CopyWeightsResponse, LoadWeightsRequest

TOKEN_HEADER = "x-tinker-weights-access-token"  # noqa: S105 -- the name of a header


async def copy_weights(call: Call) -> Reply:
    """Copy a checkpoint of the caller, a public one, or one of the account whose credential comes along."""
    token = call.headers.get(TOKEN_HEADER) or call.request.weights_access_token
    store = call.engine.store
    source = find_checkpoint(store, call.owner, call.request.source_path, granted_by(call, token))
    call.engine.integrity.check(source)
    quotas = Quotas(call.engine.config, store)
    quotas.check_new_checkpoint(call.owner)
    key = call.headers.get("x-idempotency-key")
    copy = await asyncio.to_thread(copy_checkpoint, store, quotas, call.owner, source, call.request, key)
    await call.engine.flushed()
    return CopyWeightsResponse(tinker_path=copy.path)


def granted_by(call: Call, token: str | None) -> str | None:
    """The account that a weights access token (an API key of it, or a token for one) lets the caller read as."""
    if token is None:
        return None
    if not call.engine.config.auth:
        return call.owner
    key = key_of(call.engine, token)
    if key is None:
        raise NotAllowed(
            "this server does not know that weights_access_token; it is a key of the other account."
        )
    return key.user_id


def with_grant(call: Call, request: LoadWeightsRequest) -> LoadWeightsRequest:
    """The request as it is recorded: with the account that was proven instead of the secret that proved it."""
    granted = granted_by(call, request.weights_access_token)
    return msgspec.structs.replace(request, weights_access_token=granted)


HANDLERS: Mapping[str, Handler] = {"copy_weights": copy_weights}
