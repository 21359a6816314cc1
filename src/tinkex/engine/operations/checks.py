"""What a request is checked for before it is accepted, so that bad input is refused with nothing executed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinkex.engine.backend.exports import check_recipients
from tinkex.engine.config import EngineConfig
from tinkex.engine.operations.access import check_free, find_checkpoint
from tinkex.engine.operations.backlog import Operation
from tinkex.engine.operations.intact import Intact
from tinkex.engine.operations.losses import CustomLosses, declared_inputs
from tinkex.engine.operations.quotas import Quotas
from tinkex.engine.operations.served import Base, ServedModels
from tinkex.engine.sampler.job import SampleJob
from tinkex.engine.store import CheckpointKind, CheckpointRow, RunRow, Store, check_name
from tinkex.engine.trainer.examples import MAX_RANK, read_pass
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
LARGEST, SMALLEST = 3.4e38, 1.2e-38
"""The numbers that 32 bits hold with all their digits."""
MAX_TTL_S = 100 * 366 * 86_400
SEEDS = range(-(2**63), 2**63)


class Checks:
    """Refuses what cannot work, with an error that says why and what to do. Safe to use from any thread."""

    def __init__(
        self,
        config: EngineConfig,
        store: Store,
        models: ServedModels,
        losses: CustomLosses,
        intact: Intact,
    ) -> None:
        self._config = config
        self._store = store
        self._models = models
        self._losses = losses
        self.intact = intact
        self._quotas = Quotas(config, store)

    def new_run(self, owner: str, request: CreateModelRequest) -> None:
        """Whether a run can be created as asked."""
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
        self._quotas.new_run(owner)

    def new_run_from_checkpoint(self, owner: str, request: LoadWeightsRequest) -> CheckpointRow:
        """Whether a run can be created from a checkpoint; returns that checkpoint."""
        checkpoint = self._load(owner, request)
        self._optimizer(request.optimizer_config)
        self._quotas.new_run(owner)
        self.same_base(
            self._models.find(request.base_model or checkpoint.base_model), checkpoint, request.path
        )
        return checkpoint

    def operation(self, owner: str, row: RunRow, request: Operation) -> int:
        """Whether an operation of a run can work; returns how many tokens it will cost."""
        match request:
            case ForwardBackwardRequest():
                return self._pass(row, request)
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
                check_free(self._store, row.run_id, kind, name, overwrite=request.overwrite)
                self._quotas.new_checkpoint(owner)
            case SaveWeightsExternalRequest():
                check_ttl(request.ttl_seconds)
                check_recipients(request.age_encryption_recipients)
                kind, name = CheckpointKind.EXTERNAL_WEIGHTS, check_name(request.path)
                check_free(self._store, row.run_id, kind, name, overwrite=False)
                self._quotas.new_checkpoint(owner)
            case SaveWeightsForSamplerRequest():
                self._save_for_sampler(row, request)
            case LoadWeightsRequest():
                checkpoint = self._load(owner, request)
                self.same_base(self._models.find(row.base_model), checkpoint, request.path)
        return 0

    def sample(self, base: Base, request: SampleRequest, request_id: str, ids: list[str]) -> int:
        """Whether a sample can be drawn; returns how long its prompt is."""
        if request.record_stability_info:
            raise Unsupported("record_stability_info is not offered by this server; leave it out.")
        if base.loaded:
            job = SampleJob.of(request, request_id=request_id, adapter=None, sequence_ids=ids)
            base.facts.samples.check(job)
        return num_tokens(request.prompt)

    def num_samples(self, request: SampleRequest) -> int:
        """How many sequences a request asks for, if that is not too many."""
        most = self._config.max_samples_per_request
        if not 1 <= request.num_samples <= most:
            raise InvalidInput(f"num_samples is {request.num_samples}; ask for 1 to {most} per request.")
        return request.num_samples

    def same_base(self, base: Base, checkpoint: CheckpointRow, path: str) -> None:
        """Whether a checkpoint was trained on this base model."""
        if self._models.find(checkpoint.base_model) is not base:
            raise InvalidInput(
                f"{path} was trained on {checkpoint.base_model}, which is another model than {base.source}."
            )

    def _pass(self, row: RunRow, request: ForwardBackwardRequest) -> int:
        custom_loss = self._losses.of(row.owner, request)
        base = self._models.find(row.base_model)
        if base.loaded:
            # What is asked of a model that was never loaded is checked when its turn comes.
            declared = declared_inputs(custom_loss) if custom_loss is not None else None
            read_pass(request.data, request.loss_fn, request.loss_fn_config, base.facts.passes, declared)
        return sum(num_tokens(datum.model_input) for datum in request.data)

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
            check_free(self._store, row.run_id, kind, check_name(request.path), overwrite=False)
            self._quotas.new_checkpoint(row.owner)

    def _load(self, owner: str, request: LoadWeightsRequest) -> CheckpointRow:
        checkpoint = find_checkpoint(self._store, owner, request.path, request.weights_access_token)
        if checkpoint.kind is CheckpointKind.EXTERNAL_WEIGHTS:
            raise InvalidInput(f"{request.path} was exported for use elsewhere; load what save_state saved.")
        if request.optimizer and not checkpoint.has_optimizer:
            raise InvalidInput(
                f"{request.path} holds no optimizer state; load it without, or load a checkpoint made by save_state."
            )
        self.intact.check(checkpoint)
        return checkpoint

    def _optimizer(self, config: Mapping[str, Any] | None) -> None:
        name = (config or {}).get("type", ADAM)
        if name != ADAM:
            raise Unsupported(f"the optimizer {name!r} is not offered by this server; use {ADAM!r}.")
        for other in (config or {}).keys() - {"type"}:
            raise InvalidInput(
                f"optimizer_config has {other!r}, which {ADAM} does not read; give the settings of a step to optim_step."
            )


def num_tokens(model_input: ModelInput) -> int:
    """The length of an input, which must be known.

    >>> num_tokens(ModelInput.from_ints([1, 2, 3]))
    3
    """
    try:
        return model_input.length
    except ValueError as error:
        raise InvalidInput(f"the length of an input is not known: {error}") from error


def check_ttl(ttl_seconds: int | None) -> None:
    """Whether a checkpoint can be kept so long; what has no date in a calendar would break every list it is in.

    >>> check_ttl(86_400)
    """
    if ttl_seconds is not None and not 1 <= ttl_seconds <= MAX_TTL_S:
        raise InvalidInput(
            f"ttl_seconds is {ttl_seconds}; give 1 to {MAX_TTL_S} (a hundred years), or leave it out to keep the checkpoint."
        )


def _adam(params: AdamParams) -> None:
    """Refuse what 32-bit weights cannot be changed by: it would turn all of them into nothing."""
    for name in ("learning_rate", "weight_decay"):
        if getattr(params, name) > LARGEST:
            raise InvalidInput(
                f"adam_params.{name} is {getattr(params, name):g}; weights are 32-bit numbers, give less."
            )
    if params.eps < SMALLEST:
        raise InvalidInput(f"adam_params.eps is {params.eps:g}, which is 0 for 32-bit weights; give more.")
