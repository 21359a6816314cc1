"""Validation of requests before they are accepted, so that bad input is rejected with nothing executed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinkex.engine.config import EngineConfig
from tinkex.engine.integrity import CheckpointIntegrity
from tinkex.engine.lanes.export_files import check_recipients
from tinkex.engine.lanes.interface import PassJob
from tinkex.engine.lookup import (
    check_name_is_free,
    check_same_base,
    find_checkpoint,
)
from tinkex.engine.operation import OperationRequest
from tinkex.engine.passes import find_custom_loss, read_job
from tinkex.engine.quotas import Quotas
from tinkex.engine.sampler.job import SampleJob
from tinkex.engine.served_models import ServedModel, ServedModels
from tinkex.engine.store import CheckpointKind, CheckpointRow, RunRow, Store, check_name
from tinkex.engine.trainer.examples import MAX_RANK
from tinkex.errors import InvalidInput, Unsupported
from tinkex.types import (
    AdamParams,
    CreateModelRequest,
    ForwardBackwardRequest,
    LoadWeightsRequest,
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

    def new_run(self, owner: str, request: CreateModelRequest) -> None:
        """Raise if a run cannot be created as requested."""
        if request.lora_config is None:
            raise InvalidInput(
                "create_model came without lora_config; this server trains LoRA adapters, not whole models. "
                "Use create_lora_training_client."
            )
        if request.lora_config.rank > MAX_RANK:
            raise InvalidInput(
                f"lora_config.rank is {request.lora_config.rank}; this server trains ranks 1 to {MAX_RANK}."
            )
        seed = request.lora_config.seed
        if seed is not None and seed not in SEEDS:
            raise InvalidInput(f"lora_config.seed is {seed}; give one of 64 bits, or leave it out.")
        self._optimizer(request.optimizer_config)
        self._quotas.check_new_run(owner)

    def new_run_from_checkpoint(self, owner: str, request: LoadWeightsRequest) -> CheckpointRow:
        """The checkpoint that a run is created from; raises if it cannot be."""
        checkpoint = self._load(owner, request)
        self._optimizer(request.optimizer_config)
        self._quotas.check_new_run(owner)
        model = self._models.find(request.base_model or checkpoint.base_model)
        check_same_base(self._models, model, checkpoint, request.path)
        return checkpoint

    def operation(self, owner: str, row: RunRow, request: OperationRequest) -> None:
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
            case SaveWeightsRequest():
                if request.path is None:
                    raise InvalidInput("save_weights needs a name (path).")
                check_ttl(request.ttl_seconds)
                kind, name = CheckpointKind.WEIGHTS, check_name(request.path)
                check_name_is_free(self._store, row.run_id, kind, name, overwrite=request.overwrite)
                self._quotas.check_new_checkpoint(owner)
            case SaveWeightsExternalRequest():
                check_ttl(request.ttl_seconds)
                check_recipients(request.age_encryption_recipients)
                kind, name = CheckpointKind.EXTERNAL_WEIGHTS, check_name(request.path)
                check_name_is_free(self._store, row.run_id, kind, name, overwrite=False)
                self._quotas.check_new_checkpoint(owner)
            case SaveWeightsForSamplerRequest():
                self._save_for_sampler(row, request)
            case LoadWeightsRequest():
                checkpoint = self._load(owner, request)
                model = self._models.find(row.base_model)
                check_same_base(self._models, model, checkpoint, request.path)

    def sample(self, model: ServedModel, request: SampleRequest, request_id: str, ids: list[str]) -> int:
        """The length of a sample's prompt; raises if the sample cannot be drawn."""
        if request.record_stability_info:
            raise Unsupported("record_stability_info is not offered by this server; leave it out.")
        if model.known:
            job = SampleJob.of(request, request_id=request_id, adapter=None, sequence_ids=ids)
            model.info.samples.check(job)
        return count_tokens(request.prompt)

    def num_samples(self, request: SampleRequest) -> int:
        """How many sequences a request asks for; raises if they are too many."""
        limit = self._config.max_samples_per_request
        if not 1 <= request.num_samples <= limit:
            raise InvalidInput(f"num_samples is {request.num_samples}; ask for 1 to {limit} per request.")
        return request.num_samples

    def read_pass(self, row: RunRow, request: ForwardBackwardRequest) -> PassJob | None:
        """The job of a pass; raises if it cannot run. None for a model that was never loaded: it is read when it runs."""
        model = self._models.find(row.base_model)
        if model.known:
            return read_job(self._store, row.owner, row.run_id, request, model.info)
        find_custom_loss(self._store, row.owner, request)
        return None

    def _save_for_sampler(self, row: RunRow, request: SaveWeightsForSamplerRequest) -> None:
        if request.path is None and request.sampling_session_seq_id is None:
            raise InvalidInput("save_weights_for_sampler needs a name (path), or a sampling_session_seq_id.")
        if request.path is None and request.ttl_seconds is not None:
            raise InvalidInput(
                "ttl_seconds needs a named save; an unnamed snapshot lives as long as its session."
            )
        check_ttl(request.ttl_seconds)
        if request.path is not None:
            kind = CheckpointKind.SAMPLER_WEIGHTS
            check_name_is_free(self._store, row.run_id, kind, check_name(request.path), overwrite=False)
            self._quotas.check_new_checkpoint(row.owner)

    def _load(self, owner: str, request: LoadWeightsRequest) -> CheckpointRow:
        checkpoint = find_checkpoint(self._store, owner, request.path, request.weights_access_token)
        if checkpoint.kind is CheckpointKind.EXTERNAL_WEIGHTS:
            raise InvalidInput(f"{request.path} was exported for use elsewhere; load what save_state saved.")
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
