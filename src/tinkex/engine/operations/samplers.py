"""Samplers, and accepting the samples that are asked of them."""

from __future__ import annotations

import time

from tinkex.engine.operations.access import find_checkpoint, find_sampler, find_session
from tinkex.engine.operations.backlog import Backlog, Operation
from tinkex.engine.operations.checks import Checks
from tinkex.engine.operations.promises import Promises, new_request_id, sequence_ids
from tinkex.engine.operations.served import ServedModels
from tinkex.engine.scheduler import Kind, Work
from tinkex.engine.store import CheckpointKind, FutureRow, SamplerRow, Store
from tinkex.errors import InvalidInput
from tinkex.types import CreateSamplingSessionRequest, SampleRequest, UntypedAPIFuture

DEFAULT_MAX_TOKENS = 1024
"""What a sample without max_tokens, or on a model that is not loaded yet, is taken to cost when turns are shared."""


class SamplerAdmission:
    """Makes samplers and accepts samples; whoever calls it holds the lock of admission."""

    def __init__(
        self, store: Store, models: ServedModels, backlog: Backlog, checks: Checks, promises: Promises
    ) -> None:
        self._store = store
        self._models = models
        self._backlog = backlog
        self._checks = checks
        self._promises = promises

    def create(self, owner: str, request: CreateSamplingSessionRequest) -> str:
        """Make a sampler on a base model or a checkpoint; the same request again gives the same one."""
        session = find_session(self._store, owner, request.session_id)
        sampler_id = f"{session.session_id}:sample:{request.sampling_session_seq_id}"
        row = self._new(owner, sampler_id, session.session_id, request.base_model, request.model_path)
        known = self._store.samplers.get(sampler_id)
        if known is None:
            self._store.samplers.add(row)
        elif (known.base_model, known.model_path) != (row.base_model, row.model_path):
            raise InvalidInput(
                f"sampling_session_seq_id {request.sampling_session_seq_id} of this session stands for other weights already."
            )
        return sampler_id

    def find(self, owner: str, request: SampleRequest) -> SamplerRow:
        """The sampler a request names, or one made on the spot for a request that names weights itself."""
        if request.sampling_session_id is not None:
            return find_sampler(self._store, owner, request.sampling_session_id)
        return self._new(owner, f"direct:{owner}", "", request.base_model, request.model_path)

    def sample(self, owner: str, request: SampleRequest, body: bytes | None) -> UntypedAPIFuture:
        """Accept a sample, or raise why not."""
        sampler = self.find(owner, request)
        # Numbers belong to a sampling session: without one, those of a user's programs mean nothing to each other.
        target, seq_id = (
            sampler.sampler_id,
            request.seq_id if request.sampling_session_id is not None else None,
        )
        if seq_id is not None:
            repeated = self._promises.repeated(target, seq_id, request)
            if repeated is not None:
                return repeated
        self._backlog.check_room(owner)
        base = self._models.find(sampler.base_model)
        request_id = new_request_id()
        ids = sequence_ids(request_id, self._checks.num_samples(request))
        prompt_tokens = self._checks.sample(base, request, request_id, ids)
        # No sequence outgrows the context, whatever was asked for; and no column holds what may be asked for.
        most = base.facts.arch.max_context if base.loaded else DEFAULT_MAX_TOKENS
        new_tokens = min(request.sampling_params.max_tokens or DEFAULT_MAX_TOKENS, most)
        num_tokens = prompt_tokens + request.num_samples * new_tokens
        work = Work[Operation](
            request_id, owner, base.source, target, seq_id or 0, Kind.SAMPLE, num_tokens, request
        )
        with self._store.database.transaction():
            self._promises.record(work, target, seq_id, body)
            self._promises.touch(sampler.session_id)
        self._backlog.put_sample(work)
        return UntypedAPIFuture(request_id=request_id, sample_sequence_ids=ids)

    def resume(self, row: FutureRow, request: SampleRequest) -> None:
        """Put a sample that was promised before a restart back in line."""
        base = self._models.find(self.find(row.owner, request).base_model)
        work = Work[Operation](
            row.request_id, row.owner, base.source, row.target, row.seq_id or 0, Kind.SAMPLE, 1, request
        )
        self._backlog.put_sample(work)

    def _new(
        self, owner: str, sampler_id: str, session_id: str, base_model: str | None, model_path: str | None
    ) -> SamplerRow:
        if model_path is not None:
            checkpoint = find_checkpoint(self._store, owner, model_path)
            if checkpoint.kind is CheckpointKind.EXTERNAL_WEIGHTS:
                raise InvalidInput(
                    f"{model_path} was exported for use elsewhere; sample from sampler_weights."
                )
            self._checks.intact.check(checkpoint)
            if base_model is not None:
                self._checks.same_base(self._models.find(base_model), checkpoint, model_path)
            base_model, directory = base_model or checkpoint.base_model, checkpoint.directory
        elif base_model is not None:
            directory = None
        else:
            raise InvalidInput(
                "sampling needs a base_model or a model_path (tinker://<run>/sampler_weights/<name>)."
            )
        self._models.find(base_model)
        return SamplerRow(
            sampler_id=sampler_id,
            session_id=session_id,
            owner=owner,
            base_model=base_model,
            created_at=time.time(),
            model_path=model_path,
            directory=directory,
        )
