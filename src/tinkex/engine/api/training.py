"""Training: submitting operations, and information about runs and checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from tinkex.engine.api.call import Call, Handler, Reply
from tinkex.engine.api.copying import with_grant
from tinkex.engine.api.decoding import is_proto
from tinkex.engine.api.limits import check_stored_size
from tinkex.engine.lookup import find_checkpoint, find_run
from tinkex.types import (
    AdamOptimizerConfig,
    ForwardBackwardRequest,
    GetInfoResponse,
    LoadWeightsRequest,
    ModelData,
    OptimizerConfigBase,
    WeightsInfoResponse,
)


async def submit(call: Call) -> Reply:
    """Accept an operation; returns the request_id of its result."""
    check_stored_size("user_metadata", getattr(call.request, "user_metadata", None))
    is_json_pass = isinstance(call.request, ForwardBackwardRequest) and not is_proto(
        call.headers.get("content-type", "")
    )
    if isinstance(call.request, LoadWeightsRequest) and call.request.weights_access_token is not None:
        return await call.engine.accept(call.owner, with_grant(call, call.request))
    return await call.engine.accept(call.owner, call.request, None if is_json_pass else call.body)


async def get_info(call: Call) -> Reply:
    """Returns a run's model. The tokenizer is a directory if the client can read it, and a hub name otherwise."""
    run = find_run(call.engine.store, call.owner, call.request.model_id)
    model = call.engine.models.find(run.base_model)
    directory = await asyncio.to_thread(model.find_directory) if call.is_local else None
    return GetInfoResponse(
        model_data=ModelData(
            arch=model.info.arch.family if model.known else None,
            model_name=run.base_model,
            tokenizer_id=str(directory) if directory is not None else run.base_model,
        ),
        model_id=run.run_id,
        optimizer_config=OptimizerConfigBase.model_validate(run.optimizer_config or AdamOptimizerConfig()),
        is_lora=True,
        lora_rank=run.lora.rank if run.lora is not None else None,
        model_name=run.base_model,
    )


async def weights_info(call: Call) -> Reply:
    """Returns what is needed to create a run for a checkpoint."""
    checkpoint = find_checkpoint(call.engine.store, call.owner, call.request.tinker_path)
    return WeightsInfoResponse(
        base_model=checkpoint.base_model,
        is_lora=True,
        lora_rank=checkpoint.lora.rank,
        train_unembed=checkpoint.lora.train_unembed,
        train_mlp=checkpoint.lora.train_mlp,
        train_attn=checkpoint.lora.train_attn,
        optimizer_config=OptimizerConfigBase.model_validate(
            checkpoint.optimizer_config or AdamOptimizerConfig()
        ),
    )


HANDLERS: Mapping[str, Handler] = {
    "create_model": submit,
    "create_custom_loss": submit,
    "forward_backward": submit,
    "forward": submit,
    "optim_step": submit,
    "save_weights": submit,
    "save_weights_for_sampler": submit,
    "save_weights_external": submit,
    "load_weights": submit,
    "unload_model": submit,
    "get_info": get_info,
    "weights_info": weights_info,
}
