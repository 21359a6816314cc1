"""The trainer: packed, multi-tenant forward and backward passes, and optimizer steps.

Shapes: T packed rows, P their target tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkex.engine.model.lora import Adapter, LoraSpec
from tinkex.engine.model.memory import is_out_of_memory
from tinkex.engine.model.transformer import Transformer
from tinkex.engine.trainer.backbone import Backbone, Tenant
from tinkex.engine.trainer.batch import PackedBatch, Segment, pack_batches
from tinkex.engine.trainer.buffers import BufferPool
from tinkex.engine.trainer.checkpoint import load_state, save_state
from tinkex.engine.trainer.examples import MAX_RANK, Limits, read_pass
from tinkex.engine.trainer.head import Head, HeadLora
from tinkex.engine.trainer.losses import (
    CUSTOM,
    LOSS_GRADIENT,
    SEQUENCE_LOG_RATIO,
    sequence_log_ratio,
)
from tinkex.engine.trainer.optim import adam_step
from tinkex.engine.trainer.running_job import RunningJob
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
    split. With ``deterministic`` every job runs alone, so that its numbers are bit for bit independent of other jobs;
    without it they are the same up to fp32 rounding.

    Example:
        >>> trainer = Trainer(model)
        >>> state = trainer.create(LoraConfig(rank=8, seed=0))
        >>> [output] = trainer.run([TrainJob(state, data, loss_fn="cross_entropy")])
        >>> metrics = trainer.optim_step(state, AdamParams(learning_rate=1e-3))
    """

    def __init__(
        self, model: Transformer, *, max_tokens_per_pass: int = 2048, deterministic: bool = False
    ) -> None:
        self._model = model
        self._max_tokens = max_tokens_per_pass
        self._max_gradient_bytes = _GRADIENT_BYTES
        self._deterministic = deterministic
        self._buffers = BufferPool(_POOL_BYTES)
        self._backbone = Backbone(model)
        self._head = Head(model.unembedding_VD)
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

    def run(self, jobs: Sequence[TrainJob]) -> list[ForwardBackwardOutput | TinkexError]:
        """Runs the jobs together and returns the output or error of each, in order.

        Gradients are added to each job's state. A job that fails does not affect the others, and its state does not
        change.
        """
        outcomes: dict[int, ForwardBackwardOutput | TinkexError] = {}
        running: dict[int, RunningJob] = {}
        for number, job in enumerate(jobs):
            try:
                running[number] = self._read(job)
            except InvalidInput as error:
                outcomes[number] = error
        for numbers in self._groups(running):
            group = [running.pop(number) for number in numbers]
            self._run_group(group, self._max_tokens)
            outcomes |= {
                number: running_job.finish() for number, running_job in zip(numbers, group, strict=True)
            }
        return [outcomes[number] for number in range(len(jobs))]

    def optim_step(self, state: TrainState, params: AdamParams) -> dict[str, float]:
        """Takes one AdamW step and clears the accumulated gradient; see ``adam_step``.

        Later passes reuse the gradient's buffer, so there must be no other reference to it.
        """
        gradient = state.grad
        metrics = adam_step(state, params)
        self._buffers.release(gradient)
        return metrics

    def snapshot(self, state: TrainState) -> Adapter:
        """The current adapter, without a copy; later steps do not change it."""
        state.shared = True
        return state.adapter

    def save(self, state: TrainState, directory: Path, base_model: str, *, optimizer: bool) -> None:
        """Writes a PEFT directory, with ``optimizer`` also Adam's state, and a manifest of both."""
        save_state(state, directory, base_model, optimizer=optimizer)

    def load(self, state: TrainState, directory: Path, *, optimizer: bool) -> None:
        """Loads a saved directory; without ``optimizer`` Adam starts from zero. Clears the gradient."""
        load_state(state, directory, self._model.arch, optimizer=optimizer)

    def _read(self, job: TrainJob) -> RunningJob:
        loss, examples = read_pass(job.data, job.loss_fn, job.loss_fn_config, self.limits, job.custom_loss)
        return RunningJob(job, loss, examples, self._buffers)

    def _groups(self, running: Mapping[int, RunningJob]) -> list[list[int]]:
        """Which jobs share passes: with or without gradients, and as many as have memory for their gradients."""
        if self._deterministic:
            return [[number] for number in running]
        groups: list[list[int]] = [[n for n, running_job in running.items() if not running_job.job.backward]]
        room = 0
        for number, running_job in running.items():
            if running_job.job.backward:
                size = running_job.adapter.params.nbytes
                if size > room or len(groups) == 1:
                    groups.append([])
                    room = self._max_gradient_bytes
                groups[-1].append(number)
                room -= size
        return groups

    def _run_group(self, running: list[RunningJob], max_tokens: int) -> None:
        """Runs jobs that all have gradients or all have none, in smaller passes if memory runs out."""
        if not running:
            return
        try:
            for running_job in running:
                running_job.start()
            for packed in pack_batches(
                [(n, running_job.examples) for n, running_job in enumerate(running)], max_tokens
            ):
                rest = packed.without(
                    {n for n, running_job in enumerate(running) if running_job.error is not None}
                )
                if rest is not None:
                    self._run_pass(rest, running, max_tokens)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._buffers.clear()
        else:
            return
        max_length = max(example.num_tokens for running_job in running for example in running_job.examples)
        if max_tokens > max_length:
            self._run_group(running, max(max_length, max_tokens // 2))
        elif len(running) > 1:
            for running_job in running:
                self._run_group([running_job], max_tokens)
        elif max_tokens > 1 and running[0].job.backward:
            self._run_group(running, 1)  # one sequence per pass, with activation checkpointing
        else:
            running[0].error = EngineFailure(
                f"a sequence of {max_length} tokens needs more memory than is free; send shorter ones, or run the engine "
                "with more memory"
            )

    def _run_pass(self, packed: PackedBatch, running: Sequence[RunningJob], max_tokens: int) -> None:
        """One forward and backward pass; records results and gradients in the running jobs."""
        backward = running[packed.segments[0].job].job.backward
        tenants = [Tenant(running[s.job].adapter, running[s.job].grad) for s in packed.segments]
        # A sequence longer than the budget has its own pass, with activation checkpointing.
        recompute = len(packed.tokens_T) > max_tokens
        with torch.set_grad_enabled(backward):
            hidden_TD = self._backbone.hidden(packed, tenants, recompute=recompute)
        with torch.no_grad():
            grad_TD = self._losses(hidden_TD.detach(), packed, running, backward=backward)
        if grad_TD is not None and hidden_TD.requires_grad:
            torch.autograd.backward(hidden_TD, grad_TD)

    def _losses(
        self, hidden_TD: Tensor, packed: PackedBatch, running: Sequence[RunningJob], *, backward: bool
    ) -> Tensor | None:
        """Records logprobs and losses; returns the gradient of the hidden states, if any."""
        loras = [running[s.job].head_lora() for s in packed.segments]
        lp_P = hidden_TD.new_empty(len(packed.targets_P))
        self._score_sequences(hidden_TD, packed, running, loras, lp_P)
        inputs = [_completed_inputs(s, running[s.job], lp_P) for s in packed.segments]
        tensors = [{name: torch.from_numpy(v) for name, v in by_name.items()} for by_name in inputs]

        def gradient(number: int, targets: npt.NDArray[np.int64], lp_m: Tensor) -> Tensor:
            segment = packed.segments[number]
            running_job = running[segment.job]
            own = torch.from_numpy(targets - segment.targets.start)
            _, gradient_m = running_job.loss.elementwise_and_gradient(
                lp_m, {k: v[own] for k, v in tensors[number].items()}
            )
            # The rows of a failed job must not propagate NaN; recording its losses finds the datum.
            if not bool(torch.isfinite(gradient_m).all()):
                running_job.fail("the gradient of the loss is not finite")
                return torch.zeros_like(gradient_m)
            return gradient_m

        rows = np.arange(len(packed.tokens_T))
        trains_T = _trained_rows(packed, running, inputs) if backward else np.zeros(len(rows), dtype=bool)
        grad_TD = torch.zeros_like(hidden_TD) if trains_T.any() else None
        if grad_TD is not None:
            self._head.train(hidden_TD, packed, loras, rows[trains_T], lp_P, gradient, grad_TD)
        self._head.score(hidden_TD, packed, loras, rows[~trains_T], lp_P)
        for number, segment in enumerate(packed.segments):
            running_job = running[segment.job]
            lp_own = lp_P[segment.targets]
            loss_own = running_job.loss.elementwise(lp_own, tensors[number])
            running_job.record(segment.members, lp_own.numpy(), loss_own.numpy(), inputs[number])
        return grad_TD

    def _score_sequences(
        self,
        hidden_TD: Tensor,
        packed: PackedBatch,
        running: Sequence[RunningJob],
        loras: Sequence[HeadLora | None],
        lp_P: Tensor,
    ) -> None:
        """Logprobs of the segments with sequence-level losses, which need them before any gradient."""
        for segment in packed.segments:
            if running[segment.job].loss.sequence_level:
                rows = np.arange(segment.rows.start, segment.rows.stop)
                self._head.score(hidden_TD, packed, loras, rows, lp_P)


def _completed_inputs(segment: Segment, running_job: RunningJob, lp_P: Tensor) -> dict[str, Floats]:
    """The loss inputs of a segment, with those computed from the logprobs of whole sequences."""
    inputs = dict(segment.inputs)
    if running_job.loss.sequence_level:
        sizes = [member.example.targets.size for member in segment.members]
        per_datum = list(zip(lp_P[segment.targets].split_with_sizes(sizes), segment.members, strict=True))
        if running_job.loss is CUSTOM:
            inputs[LOSS_GRADIENT] = torch.cat(
                [running_job.run_graph(member, lp_N) for lp_N, member in per_datum]
            ).numpy()
        else:
            inputs[SEQUENCE_LOG_RATIO] = np.concatenate(
                [sequence_log_ratio(lp_N.numpy(), member.example.inputs) for lp_N, member in per_datum]
            )
    return inputs


def _trained_rows(
    packed: PackedBatch, running: Sequence[RunningJob], inputs: Sequence[Mapping[str, Floats]]
) -> npt.NDArray[np.bool_]:
    """The rows that can have a gradient: those with a target whose gate is not zero."""
    gates = [
        np.ones(segment.targets.stop - segment.targets.start, dtype=bool)
        if running[segment.job].loss.gate is None
        else own[str(running[segment.job].loss.gate)] != 0
        for segment, own in zip(packed.segments, inputs, strict=True)
    ]
    return np.logical_or.reduceat(np.concatenate(gates), packed.first_target_T1[:-1])
