"""Sampling: samplers, and submitting prompts to them."""

from __future__ import annotations

from collections.abc import Mapping

from tinkex.engine.api.call import Call, Handler, Reply
from tinkex.engine.intake.assets import check_pointers
from tinkex.engine.lookup import find_sampler
from tinkex.errors import InvalidInput
from tinkex.types import CreateSamplingSessionResponse, GetSamplerResponse, JoinSamplingSessionResponse


async def create_sampling_session(call: Call) -> Reply:
    """Create a sampler for a base model or saved weights."""
    sampler_id = call.engine.admission.create_sampler(call.owner, call.request)
    return CreateSamplingSessionResponse(sampling_session_id=sampler_id)


async def asample(call: Call) -> Reply:
    """Accept a prompt; returns the ids of the request and of its sequences."""
    engine = call.engine
    if not all(model.known for model in engine.models.all):
        sampler = engine.admission.find_sampler(call.owner, call.request)
        await engine.load(engine.models.find(sampler.base_model))
    try:
        return await engine.accept(call.owner, call.request, call.body)
    except InvalidInput:
        check_pointers(engine.store, call.owner, call.request.prompt)  # its error names the invalid pointer
        raise


async def get_sampler(call: Call) -> Reply:
    """Returns the weights of a sampler."""
    sampler = find_sampler(call.engine.store, call.owner, call.parameters["sampler_id"])
    return GetSamplerResponse(
        sampler_id=sampler.sampler_id, base_model=sampler.base_model, model_path=sampler.model_path
    )


async def join_sampling_session(call: Call) -> Reply:
    """Add a client to a sampler; returns its number, which determines the range of its seq_ids."""
    sampler = find_sampler(call.engine.store, call.owner, call.request.sampling_session_id)
    return JoinSamplingSessionResponse(
        client_counter=call.engine.store.samplers.add_client(sampler.sampler_id)
    )


HANDLERS: Mapping[str, Handler] = {
    "create_sampling_session": create_sampling_session,
    "asample": asample,
    "get_sampler": get_sampler,
    "join_sampling_session": join_sampling_session,
}
