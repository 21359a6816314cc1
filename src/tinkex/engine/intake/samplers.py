"""Samplers, and the acceptance of samples."""

from __future__ import annotations

from tinkex.engine.intake.accepted import AcceptedRequests, new_request_id
from tinkex.engine.intake.checks import Checks
from tinkex.engine.integrity import CheckpointIntegrity
from tinkex.engine.lookup import find_session, new_sampler, resolve_sampler, sequence_ids
from tinkex.engine.operation import Kind, Operation
from tinkex.engine.running.table import OperationTable
from tinkex.engine.served_models import ServedModels
from tinkex.engine.store import SamplerRow, Store
from tinkex.errors import InvalidInput
from tinkex.types import CreateSamplingSessionRequest, SampleRequest, UntypedAPIFuture

DEFAULT_MAX_TOKENS = 1024
"""The assumed cost of a sample without max_tokens, or on a model that is not loaded yet, for fair shares."""


class SamplerAdmission:
    """Creates samplers and accepts samples. Called with the intake lock held, except :meth:`find`."""

    def __init__(
        self,
        store: Store,
        models: ServedModels,
        table: OperationTable,
        integrity: CheckpointIntegrity,
        checks: Checks,
        accepted: AcceptedRequests,
    ) -> None:
        self._store = store
        self._models = models
        self._table = table
        self._integrity = integrity
        self._checks = checks
        self._accepted = accepted

    def create(self, owner: str, request: CreateSamplingSessionRequest) -> str:
        """Create a sampler on a base model or a checkpoint; the same request again returns the same one."""
        session = find_session(self._store, owner, request.session_id)
        sampler_id = f"{session.session_id}:sample:{request.sampling_session_seq_id}"
        row = new_sampler(
            self._store,
            self._models,
            self._integrity,
            owner,
            sampler_id,
            session.session_id,
            request.base_model,
            request.model_path,
        )
        known = self._store.samplers.get(sampler_id)
        if known is None:
            self._store.samplers.add(row)
        elif (known.base_model, known.model_path) != (row.base_model, row.model_path):
            raise InvalidInput(
                f"sampling_session_seq_id {request.sampling_session_seq_id} of this session is used for other weights."
            )
        return sampler_id

    def find(self, owner: str, request: SampleRequest) -> SamplerRow:
        """The sampler that a request names, or a temporary one for a request that names weights itself."""
        return resolve_sampler(self._store, self._models, self._integrity, owner, request)

    def sample(self, owner: str, request: SampleRequest, body: bytes | None) -> UntypedAPIFuture:
        """Accept a sample, or raise why not."""
        sampler = self.find(owner, request)
        # Numbers are per sampling session: without one, those of a user's programs are unrelated.
        seq_id = request.seq_id if request.sampling_session_id is not None else None
        if seq_id is not None:
            duplicate = self._accepted.find_duplicate(sampler.sampler_id, seq_id, request)
            if duplicate is not None:
                return duplicate
        self._table.check_room(owner)
        model = self._models.find(sampler.base_model)
        request_id = new_request_id()
        ids = sequence_ids(request_id, self._checks.num_samples(request))
        prompt_tokens = self._checks.sample(model, request, request_id, ids)
        # No sequence outgrows the context, whatever max_tokens is; and no column holds any number.
        max_context = model.info.arch.max_context if model.known else DEFAULT_MAX_TOKENS
        new_tokens = min(request.sampling_params.max_tokens or DEFAULT_MAX_TOKENS, max_context)
        num_tokens = prompt_tokens + request.num_samples * new_tokens
        operation = Operation(
            request_id,
            owner,
            model.source,
            sampler.sampler_id,
            seq_id or 0,
            Kind.SAMPLE,
            num_tokens,
            request,
        )
        with self._store.database.transaction():
            self._accepted.record(operation, seq_id, body)
            self._accepted.touch(sampler.session_id)
        self._table.add_sample(operation)
        return UntypedAPIFuture(request_id=request_id, sample_sequence_ids=ids)
