"""Validation of requests before they are accepted, so that bad input is rejected with nothing executed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tinkex.engine.config import EngineConfig
from tinkex.engine.integrity import CheckpointIntegrity
from tinkex.engine.lanes.export_files import check_recipients
from tinkex.engine.lookup import (
    check_name_is_free,
    check_readable,
    check_same_base,
    find_checkpoint,
)
from tinkex.engine.model.lora_layout import state_bytes
from tinkex.engine.operation import CHECKPOINT_KINDS, RunRequest, SaveRequest
from tinkex.engine.quotas import Quotas
from tinkex.engine.sampler.job import SampleJob
from tinkex.engine.served_models import ServedModel, ServedModels, context_length
from tinkex.engine.store import CheckpointRow, RunRow, Store, check_name
from tinkex.engine.trainer.examples import MAX_RANK
from tinkex.errors import InvalidInput, ModelUnavailable, Unsupported
from tinkex.types import (
    AdamParams,
    CreateModelRequest,
    LoadWeightsRequest,
    LoraConfig,
    ModelInput,
    OptimStepRequest,
    SampleRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)

ADAM = "adamw"
MAX_FLOAT32, MIN_FLOAT32 = 3.4e38, 1.2e-38
"""The range of normal 32-bit numbers."""
MAX_TTL_S = 100 * 366 * 86_400
SEEDS = range(-(2**63), 2**63)


class Checks:
    """Rejects what cannot work, with an error that says why and what to do. Safe on any thread."""

    def __init__(
        self,
        config: EngineConfig,
        store: Store,
        models: ServedModels,
        integrity: CheckpointIntegrity,
    ) -> None:
        self._config = config
        self._store = store
        self._models = models
        self._integrity = integrity
        self._quotas = Quotas(config, store)

    def new_run(self, owner: str, request: CreateModelRequest | LoadWeightsRequest) -> str:
        """The base model of a run that is created as requested, fresh or from a checkpoint; raises if it cannot be."""
        if isinstance(request, LoadWeightsRequest):
            checkpoint = self._load(owner, request)
            base_model = request.base_model or checkpoint.base_model
            model = self._models.find_for_use(base_model)
            self._optimizer(request.optimizer_config)
            check_same_base(self._models, base_model, checkpoint, request.path)
            self._check_size(model, checkpoint.lora)
            self._quotas.check_new_run(owner)
            return base_model
        model = self._models.find_for_use(request.base_model)
        lora = request.lora_config
        if lora is None:
            raise InvalidInput(
                "create_model came without lora_config; this server trains LoRA adapters, not whole models. "
                "Use create_lora_training_client."
            )
        check_lora(lora)
        self._optimizer(request.optimizer_config)
        self._check_size(model, lora)
        self._quotas.check_new_run(owner)
        return request.base_model

    def _check_size(self, model: ServedModel, lora: LoraConfig) -> None:
        """Raise if a run cannot fit in memory; on a model that is not loaded yet, the operation that creates it fails."""
        if model.known:
            self._quotas.check_run_size(state_bytes(model.info.arch, lora))

    def operation(self, owner: str, row: RunRow, request: RunRequest) -> None:
        """Raise if an operation of a run other than a pass cannot work."""
        match request:
            case OptimStepRequest():
                if request.optimizer_params is not None:
                    name = request.optimizer_params.get("type", "unnamed")
                    raise Unsupported(
                        f"the optimizer {name!r} is not offered by this server; use AdamParams."
                    )
                if request.adam_params is None:
                    raise InvalidInput("optim_step needs adam_params.")
                _adam(request.adam_params)
            case SaveWeightsRequest() | SaveWeightsForSamplerRequest() | SaveWeightsExternalRequest():
                self._save(row, request)
            case LoadWeightsRequest():
                checkpoint = self._load(owner, request)
                check_same_base(self._models, row.base_model, checkpoint, request.path)

    def sample(self, model: ServedModel, request: SampleRequest, request_id: str, ids: list[str]) -> int:
        """The length of a sample's prompt; raises if the sample cannot be drawn."""
        if request.record_stability_info:
            raise Unsupported("record_stability_info is not offered by this server; leave it out.")
        if model.known:
            job = SampleJob.of(request, request_id=request_id, adapter=None, sequence_ids=ids)
            model.info.samples.check(job)
            if request.sampling_params.structured_output is not None:
                model.grammars.check(request.sampling_params.structured_output)
        elif request.sampling_params.structured_output is not None and self._config.worker != "thread":
            # The worker would compile it without limits.
            raise ModelUnavailable(
                f"the model {model.source} is not in memory yet, so structured_output cannot be checked; try again in a moment."
            )
        return count_tokens(request.prompt)

    def num_samples(self, request: SampleRequest) -> int:
        """How many sequences a request asks for; raises if they are too many."""
        limit = self._config.max_samples_per_request
        if not 1 <= request.num_samples <= limit:
            raise InvalidInput(f"num_samples is {request.num_samples}; ask for 1 to {limit} per request.")
        return request.num_samples

    def _save(self, row: RunRow, request: SaveRequest) -> None:
        if isinstance(request, SaveWeightsRequest) and request.path is None:
            raise InvalidInput("save_weights needs a name (path).")
        if isinstance(request, SaveWeightsForSamplerRequest) and request.path is None:
            if request.sampling_session_seq_id is None:
                raise InvalidInput(
                    "save_weights_for_sampler needs a name (path), or a sampling_session_seq_id."
                )
            if request.ttl_seconds is not None:
                raise InvalidInput(
                    "ttl_seconds needs a named save; an unnamed snapshot is deleted when it is no longer used."
                )
        elif isinstance(request, SaveWeightsForSamplerRequest) and request.kind == "inflight":
            raise InvalidInput(
                "inflight weights have no name (path); save them with a sampling_session_seq_id."
            )
        check_ttl(request.ttl_seconds)
        if isinstance(request, SaveWeightsExternalRequest):
            check_recipients(request.age_encryption_recipients)
        if request.path is not None:
            overwrite = isinstance(request, SaveWeightsRequest) and request.overwrite
            kind, name = CHECKPOINT_KINDS[type(request)], check_name(request.path)
            check_name_is_free(self._store, row.run_id, kind, name, overwrite=overwrite)
            # It takes as much as the one before, and less what it replaces; its size is checked when it is written.
            last = self._store.checkpoints.last(row.run_id, kind, time.time())
            if last is not None and last.name != name:
                self._quotas.check_room(row.owner, last.size_bytes)

    def _load(self, owner: str, request: LoadWeightsRequest) -> CheckpointRow:
        checkpoint = find_checkpoint(self._store, owner, request.path, request.weights_access_token)
        check_readable(self._store, checkpoint)
        if request.optimizer and not checkpoint.has_optimizer:
            raise InvalidInput(
                f"{request.path} holds no optimizer state; load it without, or load a checkpoint made by save_state."
            )
        self._integrity.check(checkpoint)
        return checkpoint

    def _optimizer(self, config: Mapping[str, Any] | None) -> None:
        name = (config or {}).get("type", ADAM)
        if name != ADAM:
            raise Unsupported(f"the optimizer {name!r} is not offered by this server; use {ADAM!r}.")
        for other in (config or {}).keys() - {"type"}:
            raise InvalidInput(
                f"optimizer_config has {other!r}, which {ADAM} does not read; give the settings of a step to optim_step."
            )


def count_tokens(model_input: ModelInput) -> int:
    """The length of an input, which must be known.

    >>> count_tokens(ModelInput.from_ints([1, 2, 3]))
    3
    """
    try:
        return model_input.length
    except ValueError as error:
        raise InvalidInput(f"the length of an input is not known: {error}") from error


def check_context(field: str, num_tokens: int, base_model: str) -> None:
    """Raise ``InvalidInput`` for an input that is longer than the context in the model's name.

    >>> check_context("prompt", 64, "tiny:peft:64")
    """
    max_context = context_length(base_model)
    if max_context is not None and num_tokens > max_context:
        raise InvalidInput(
            f"{field} has {num_tokens} tokens, and the context of {base_model!r} holds {max_context}; shorten it, or use "
            "a model with a longer context."
        )


def check_lora(lora: LoraConfig) -> None:
    """Raise ``InvalidInput`` for an adapter that this server does not train.

    >>> check_lora(LoraConfig(rank=8))
    """
    if lora.rank > MAX_RANK:
        raise InvalidInput(f"lora_config.rank is {lora.rank}; this server trains ranks 1 to {MAX_RANK}.")
    if lora.seed is not None and lora.seed not in SEEDS:
        raise InvalidInput(f"lora_config.seed is {lora.seed}; give one of 64 bits, or leave it out.")


def check_ttl(ttl_seconds: int | None) -> None:
    """Raise if a TTL is out of range: a date that no calendar has would break every listing.

    >>> check_ttl(86_400)
    """
    if ttl_seconds is not None and not 1 <= ttl_seconds <= MAX_TTL_S:
        raise InvalidInput(
            f"ttl_seconds is {ttl_seconds}; give 1 to {MAX_TTL_S} (a hundred years), or leave it out to keep the checkpoint."
        )


def _adam(params: AdamParams) -> None:
    """Raise for settings outside the range of 32-bit weights: they would turn all of them into NaN."""
    for name in ("learning_rate", "weight_decay"):
        if getattr(params, name) > MAX_FLOAT32:
            raise InvalidInput(
                f"adam_params.{name} is {getattr(params, name):g}; weights are 32-bit numbers, give less."
            )
    if params.eps < MIN_FLOAT32:
        raise InvalidInput(f"adam_params.eps is {params.eps:g}, which is 0 for 32-bit weights; give more.")
