"""The trainer: packed, multi-tenant forward and backward passes, and optimizer steps.

Shapes: T packed rows, P their target tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkex.engine.model.adapter_files import TINKER_UNEMBED_PATH
from tinkex.engine.model.lora import UNEMBED_MODULE, Adapter, LoraSpec
from tinkex.engine.model.memory import is_out_of_memory
from tinkex.engine.model.transformer import Transformer
from tinkex.engine.trainer.backbone import Backbone, Tenant
from tinkex.engine.trainer.batch import JobPart, PackedBatch, pack_batches
from tinkex.engine.trainer.buffers import BufferPool
from tinkex.engine.trainer.checkpoint import load_state, save_state
from tinkex.engine.trainer.examples import MAX_RANK, Limits, read_pass
from tinkex.engine.trainer.head import Head
from tinkex.engine.trainer.loss_effort import SLICE_EFFORT, EffortSlice, SliceUsed
from tinkex.engine.trainer.losses import (
    CUSTOM,
    LOSS_GRADIENT,
    SEQUENCE_LOG_RATIO,
    sequence_log_ratio,
)
from tinkex.engine.trainer.optim import adam_step
from tinkex.engine.trainer.prefixes import MIN_SAVED
from tinkex.engine.trainer.running_job import RunningJob, RunningTenant
from tinkex.engine.trainer.state import TrainJob, TrainState
from tinkex.errors import EngineFailure, InvalidInput, TinkexError
from tinkex.types.losses import ForwardBackwardOutput
from tinkex.types.training import AdamParams, LoraConfig

__all__ = ["MAX_RANK", "TrainJob", "TrainState", "Trainer"]

_GRADIENT_BYTES = 2**30  # of the jobs that share passes; each has its own buffer until it succeeds
_POOL_BYTES = 2**29  # of gradient buffers kept between passes

Floats = npt.NDArray[np.float32]


class Trainer:
    """Trains any number of adapters on one base model.

    ``max_tokens_per_pass`` bounds the memory of a pass (about 1 MB per token for the default model); larger batches are
    split. ``slice_effort`` is what custom losses may cost before others have their turn. With ``deterministic`` every job
    runs alone, so that its numbers are bit for bit independent of other jobs; without it they are the same up to fp32
    rounding. Prefixes are shared that save at least ``min_saved`` tokens.

    Example:
        >>> trainer = Trainer(model)
        >>> state = trainer.create(LoraConfig(rank=8, seed=0))
        >>> [output] = trainer.run([TrainJob(state, data, loss_fn="cross_entropy")])
        >>> metrics = trainer.optim_step(state, AdamParams(learning_rate=1e-3))
    """

    def __init__(
        self,
        model: Transformer,
        *,
        max_tokens_per_pass: int = 2048,
        max_gradient_bytes: int = _GRADIENT_BYTES,
        slice_effort: int = SLICE_EFFORT,
        deterministic: bool = False,
        min_saved: int = MIN_SAVED,
        head: Head | None = None,
        buffers: BufferPool | None = None,
    ) -> None:
        self._model = model
        self._max_tokens = max_tokens_per_pass
        self._max_gradient_bytes = max_gradient_bytes
        self._slice_effort = slice_effort
        self._deterministic = deterministic
        self._min_saved = min_saved
        self._buffers = buffers or BufferPool(_POOL_BYTES)
        self._backbone = Backbone(model)
        self._head = head or Head(model.unembedding_VD)
        self.limits = Limits(vocab_size=model.arch.vocab_size, max_context=model.arch.max_context)
        """Limits of the datums of a job."""

    def create(self, lora: LoraConfig) -> TrainState:
        """A new state; its adapter does not change the outputs yet."""
        if not 1 <= lora.rank <= MAX_RANK:
            raise InvalidInput(f"lora_config.rank must lie in 1…{MAX_RANK}, and is {lora.rank}")
        spec = LoraSpec(
            rank=lora.rank,
            seed=lora.seed,
            train_mlp=lora.train_mlp,
            train_attn=lora.train_attn,
            train_unembed=lora.train_unembed,
        )
        return TrainState(Adapter.create(self._model.arch, spec))

    def check(self, job: TrainJob) -> None:
        """Raises ``InvalidInput`` for a job that cannot run; fast, and safe to call from any thread."""
        self._read(job)

    def run(
        self, jobs: Sequence[TrainJob], *, share_prefixes: bool = True
    ) -> list[ForwardBackwardOutput | TinkexError]:
        """Runs the jobs together and returns the output or error of each, in order.

        Gradients are added to each job's state. A job that fails does not affect the others, and its state does not
        change. With ``share_prefixes``, tokens that datums of one state have in common at their beginning are computed
        once; the numbers are the same up to fp32 rounding.
        """
        steps = self.run_in_slices(jobs, share_prefixes=share_prefixes)
        while True:
            try:
                next(steps)
            except StopIteration as ended:
                outputs: list[ForwardBackwardOutput | TinkexError] = ended.value
                return outputs

    def run_in_slices(
        self, jobs: Sequence[TrainJob], *, share_prefixes: bool = True
    ) -> Generator[None, None, list[ForwardBackwardOutput | TinkexError]]:
        """The same, and yields whenever custom losses have taken so long that others should have their turn.

        The numbers do not depend on it. What is kept meanwhile is small: activations are computed again.
        """
        outcomes: dict[int, ForwardBackwardOutput | TinkexError] = {}
        running: dict[int, RunningJob] = {}
        for number, job in enumerate(jobs):
            try:
                running[number] = self._read(job)
            except InvalidInput as error:
                outcomes[number] = error
        min_saved = self._min_saved if share_prefixes else None
        for group in self._groups(self._tenants(running, min_saved)):
            yield from self._run_group(group, self._max_tokens, min_saved)
            for tenant in group:
                outcomes |= yield from self._finish(tenant, min_saved)
        return [outcomes[number] for number in range(len(jobs))]

    def optim_step(self, state: TrainState, params: AdamParams) -> dict[str, float]:
        """Takes one AdamW step and clears the accumulated gradient; see ``adam_step``.

        Later passes reuse the gradient's buffer, so there must be no other reference to it.
        """
        gradient = state.grad
        metrics = adam_step(state, params)
        self._buffers.release(gradient)
        return metrics

    def release(self, gradient: Tensor) -> None:
        """Reuses a gradient's buffer in later passes; there must be no other reference to it."""
        self._buffers.release(gradient)

    def snapshot(self, state: TrainState) -> Adapter:
        """The current adapter, without a copy; later steps do not change it."""
        state.shared = True
        return state.adapter

    def save(self, state: TrainState, directory: Path, base_model: str, *, optimizer: bool) -> None:
        """Writes a PEFT directory, with ``optimizer`` also Adam's state, and a manifest of both.

        One without Adam's state is for samplers, and is merged by tools for the Tinker service. Those find the head of a model
        with tied embeddings only under the service's name.
        """
        is_for_samplers = not optimizer and self._model.arch.tie_embeddings
        unembed_path = TINKER_UNEMBED_PATH if is_for_samplers else UNEMBED_MODULE
        save_state(state, directory, base_model, optimizer=optimizer, unembed_path=unembed_path)

    def load(self, state: TrainState, directory: Path, *, optimizer: bool) -> None:
        """Loads a saved directory; without ``optimizer`` Adam starts from zero. Clears the gradient."""
        load_state(state, directory, self._model.arch, optimizer=optimizer)

    def _read(self, job: TrainJob) -> RunningJob:
        loss, examples = read_pass(job.data, job.loss_fn, job.loss_fn_config, self.limits, job.custom_loss)
        return RunningJob(job, loss, examples)

    def _tenants(self, running: Mapping[int, RunningJob], min_saved: int | None) -> list[RunningTenant]:
        """The jobs by what they share: those of one state, with or without gradients, if they share prefixes; else nothing."""
        together: dict[tuple[int, bool] | int, dict[int, RunningJob]] = {}
        for number, running_job in running.items():
            job = running_job.job
            is_alone = self._deterministic or min_saved is None
            key = number if is_alone else (id(job.state), job.backward)
            together.setdefault(key, {})[number] = running_job
        return [RunningTenant(jobs, self._buffers) for jobs in together.values()]

    def _groups(self, tenants: Sequence[RunningTenant]) -> list[list[RunningTenant]]:
        """Which tenants share passes: with or without gradients, and as many as have memory for their gradients."""
        if self._deterministic:
            return [[tenant] for tenant in tenants]
        groups: list[list[RunningTenant]] = [[tenant for tenant in tenants if not tenant.backward]]
        room = 0
        for tenant in tenants:
            if tenant.backward:
                size = tenant.adapter.params.nbytes
                if size > room or len(groups) == 1:
                    groups.append([])
                    room = self._max_gradient_bytes
                groups[-1].append(tenant)
                room -= size
        return groups

    def _finish(
        self, tenant: RunningTenant, min_saved: int | None
    ) -> Generator[None, None, Mapping[int, ForwardBackwardOutput | TinkexError]]:
        """The outcomes of a tenant's jobs. If one of several failed, each runs again alone: their gradients are one sum."""
        tenant.check_gradient()
        if not tenant.has_failed or len(tenant.jobs) == 1:
            return tenant.finish()
        outcomes: dict[int, ForwardBackwardOutput | TinkexError] = {}
        for alone in tenant.alone():
            yield from self._run_group([alone], self._max_tokens, min_saved)
            alone.check_gradient()
            outcomes |= alone.finish()
        return outcomes

    def _run_group(
        self, tenants: list[RunningTenant], max_tokens: int, min_saved: int | None
    ) -> Iterator[None]:
        """Runs tenants that all have gradients or all have none, in smaller passes if memory runs out."""
        if not tenants:
            return
        examples = [
            {number: running_job.examples for number, running_job in tenant.jobs.items()}
            for tenant in tenants
        ]
        try:
            efforts = [running_job.job.effort for tenant in tenants for running_job in tenant.jobs.values()]
            effort_slice = EffortSlice(efforts, self._slice_effort)
            for tenant in tenants:
                tenant.start(effort_slice)
            for packed in pack_batches(examples, max_tokens, min_saved=min_saved):
                rest = packed.without({n for n, tenant in enumerate(tenants) if tenant.has_failed})
                if rest is not None and not self._run_pass(rest, tenants, max_tokens):
                    while not _resume_graphs(rest, tenants):
                        yield
                        effort_slice.renew()
                    self._run_pass(rest, tenants, max_tokens)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._buffers.clear()
        else:
            return
        max_length = max(each.num_tokens for tenant in examples for own in tenant.values() for each in own)
        if max_tokens > max_length:
            yield from self._run_group(tenants, max(max_length, max_tokens // 2), min_saved)
        elif len(tenants) > 1:
            for tenant in tenants:
                yield from self._run_group([tenant], max_tokens, min_saved)
        elif max_tokens > 1 and tenants[0].backward:
            # One sequence per pass, with activation checkpointing.
            yield from self._run_group(tenants, 1, min_saved)
        else:
            for running_job in tenants[0].jobs.values():
                running_job.error = EngineFailure(
                    f"a sequence of {max_length} tokens needs more memory than is free; send shorter ones, or run the engine "
                    "with more memory"
                )

    def _run_pass(self, packed: PackedBatch, tenants: Sequence[RunningTenant], max_tokens: int) -> bool:
        """One forward and backward pass; records results and gradients in the tenants and their jobs.

        Returns False, with nothing recorded, if custom losses have used up the slice.
        """
        own = [tenants[segment.tenant] for segment in packed.segments]
        # A sequence or a tree of prefixes that exceeds the budget has its own pass, with activation checkpointing.
        recompute = len(packed.tokens_T) > max_tokens
        with torch.set_grad_enabled(own[0].backward):
            adapters = [Tenant(tenant.adapter, tenant.grad) for tenant in own]
            hidden_TD = self._backbone.hidden(packed, adapters, recompute=recompute)
        with torch.no_grad():
            lp_P = self._score_sequences(hidden_TD.detach(), packed, own)
            if not _resume_graphs(packed, tenants):
                return False
            grad_TD = self._losses(hidden_TD.detach(), packed, own, lp_P)
        if grad_TD is not None and hidden_TD.requires_grad:
            torch.autograd.backward(hidden_TD, grad_TD)
        return True

    def _losses(
        self, hidden_TD: Tensor, packed: PackedBatch, tenants: Sequence[RunningTenant], lp_P: Tensor
    ) -> Tensor | None:
        """Records logprobs and losses; returns the gradient of the hidden states, if any. Has a tenant for every segment."""
        loras = [tenant.head_lora() for tenant in tenants]
        parts = [
            (part, tenant.jobs[part.job])
            for segment, tenant in zip(packed.segments, tenants, strict=True)
            for part in segment.parts
        ]
        inputs = [_completed_inputs(part, running_job, lp_P) for part, running_job in parts]
        tensors = [{name: torch.from_numpy(v) for name, v in by_name.items()} for by_name in inputs]

        def gradient(targets_m: npt.NDArray[np.int64], lp_m: Tensor) -> Tensor:
            g_m = torch.empty_like(lp_m)
            for (part, running_job), own_inputs in zip(parts, tensors, strict=True):
                [places] = np.nonzero((targets_m >= part.targets.start) & (targets_m < part.targets.stop))
                if places.size:
                    own = torch.from_numpy(targets_m[places] - part.targets.start)
                    places_m = torch.from_numpy(places)
                    _, gradient_m = running_job.loss.elementwise_and_gradient(
                        lp_m[places_m], {k: v[own] for k, v in own_inputs.items()}
                    )
                    # The rows of a failed job must not propagate NaN; recording its losses finds the datum.
                    if not bool(torch.isfinite(gradient_m).all()):
                        running_job.fail("the gradient of the loss is not finite")
                        gradient_m = torch.zeros_like(gradient_m)
                    g_m[places_m] = gradient_m
            return g_m

        rows = np.arange(len(packed.tokens_T))
        trains_T = np.zeros(len(rows), dtype=bool)
        if tenants[0].backward:
            trains_T = _trained_rows(packed, [running_job for _, running_job in parts], inputs)
        grad_TD = torch.zeros_like(hidden_TD) if trains_T.any() else None
        if grad_TD is not None:
            self._head.train(hidden_TD, packed, loras, rows[trains_T], lp_P, gradient, grad_TD)
        self._head.score(hidden_TD, packed, loras, rows[~trains_T], lp_P)
        for (part, running_job), own_inputs, own_tensors in zip(parts, inputs, tensors, strict=True):
            lp_own = lp_P[part.targets]
            loss_own = running_job.loss.elementwise(lp_own, own_tensors)
            running_job.record(part.members, lp_own.numpy(), loss_own.numpy(), own_inputs)
        for segment, tenant in zip(packed.segments, tenants, strict=True):
            for job, num_rows in segment.rows_by_job.items():
                tenant.jobs[job].job.effort.tokens_computed += num_rows
        return grad_TD

    def _score_sequences(
        self, hidden_TD: Tensor, packed: PackedBatch, tenants: Sequence[RunningTenant]
    ) -> Tensor:
        """The logprobs of all targets, with those of segments with sequence-level losses, which need them before any gradient."""
        loras = [tenant.head_lora() for tenant in tenants]
        lp_P = hidden_TD.new_empty(len(packed.targets_P))
        for segment, tenant in zip(packed.segments, tenants, strict=True):
            if any(tenant.jobs[part.job].loss.sequence_level for part in segment.parts):
                rows = np.arange(segment.rows.start, segment.rows.stop)
                self._head.score(hidden_TD, packed, loras, rows, lp_P)
            for part in segment.parts:
                if tenant.jobs[part.job].loss is CUSTOM:
                    tenant.jobs[part.job].prepare_graphs(part.members, _per_datum(part, lp_P))
        return lp_P


def _per_datum(part: JobPart, lp_P: Tensor) -> Sequence[Tensor]:
    """The logprobs of each datum of a job."""
    return lp_P[part.targets].split_with_sizes([m.example.targets.size for m in part.members])


def _resume_graphs(packed: PackedBatch, tenants: Sequence[RunningTenant]) -> bool:
    """Computes custom losses of a pass until all are computed, or the slice is used up; returns whether all are."""
    try:
        for segment in packed.segments:
            for part in segment.parts:
                running_job = tenants[segment.tenant].jobs[part.job]
                if running_job.loss is CUSTOM:
                    running_job.run_graphs()
    except SliceUsed:
        return False
    return True


def _completed_inputs(part: JobPart, running_job: RunningJob, lp_P: Tensor) -> dict[str, Floats]:
    """The loss inputs of a job, with those computed from the logprobs of whole sequences."""
    inputs = dict(part.inputs)
    if running_job.loss.sequence_level:
        if running_job.loss is CUSTOM:
            inputs[LOSS_GRADIENT] = torch.cat(list(running_job.run_graphs())).numpy()
        else:
            per_datum = zip(_per_datum(part, lp_P), part.members, strict=True)
            inputs[SEQUENCE_LOG_RATIO] = np.concatenate(
                [sequence_log_ratio(lp_N.numpy(), member.example.inputs) for lp_N, member in per_datum]
            )
    return inputs


def _trained_rows(
    packed: PackedBatch, running: Sequence[RunningJob], inputs: Sequence[Mapping[str, Floats]]
) -> npt.NDArray[np.bool_]:
    """The rows that can have a gradient: those with a target whose gate is not zero."""
    gates = [
        np.ones(part.targets.stop - part.targets.start, dtype=bool)
        if running_job.loss.gate is None
        else own[str(running_job.loss.gate)] != 0
        for part, running_job, own in zip(packed.parts, running, inputs, strict=True)
    ]
    by_row_P = np.concatenate(gates)[packed.targets_by_row_P]
    return np.logical_or.reduceat(by_row_P, packed.first_target_T1[:-1])
