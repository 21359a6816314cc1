"""The backend in this process: base models with their trainers and samplers, and the runs on them."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from tinkex._wire import json as wire_json
from tinkex._wire import proto as wire_proto
from tinkex.engine.lanes import savepoint_files
from tinkex.engine.lanes.adapter_cache import AdapterCache
from tinkex.engine.lanes.export_files import write_export
from tinkex.engine.lanes.import_files import write_import
from tinkex.engine.lanes.interface import (
    AddRequest,
    BatchStats,
    DecodeReport,
    DecodeStep,
    ModelInfo,
    PassJob,
    PassReport,
    ShardTask,
    StepResult,
    TokenDelta,
    UploadedLoss,
    WorkerStatus,
)
from tinkex.errors import TinkexError
from tinkex.types import CreateCustomLossRequest

if TYPE_CHECKING:
    from tinkex.engine.config import EngineConfig
    from tinkex.engine.model.adapter_copy import AdapterCopy
    from tinkex.engine.model.catalog import LoadedModel, Progress
    from tinkex.engine.model.lora import Adapter
    from tinkex.engine.sampler.request import Continuation
    from tinkex.engine.sampler.sampler import Sampler
    from tinkex.engine.store import SavepointRow
    from tinkex.engine.trainer.loss_graph import LossGraph
    from tinkex.engine.trainer.shard_sum import ShardSum
    from tinkex.engine.trainer.shards import ShardResult
    from tinkex.engine.trainer.state import TrainJob, TrainState
    from tinkex.engine.trainer.trainer import Trainer
    from tinkex.types import AdamParams, ForwardBackwardOutput, LoraConfig, SampleResponse

logger = logging.getLogger("tinkex.engine")

_SuspendedPass: TypeAlias = (
    "tuple[Sequence[TrainJob], Generator[None, None, list[ForwardBackwardOutput | TinkexError]]]"
)

MAX_LOSSES_IN_MEMORY = 256


@dataclass(frozen=True)
class _Model:
    """A base model in memory."""

    loaded: LoadedModel
    trainer: Trainer
    sampler: Sampler
    info: ModelInfo


@dataclass(frozen=True)
class _LoadedRun:
    """A run in memory, on its base model."""

    model: _Model
    state: TrainState


class LocalBackend:
    """Holds base models, runs and samples, and computes with them on the calling thread.

    Only called on the lane's thread, except ``write_savepoint`` and ``copy_adapter`` (one other thread at a time) and ``check_loss``, ``import_weights``,
    ``check`` and ``status`` (any thread). A call raises what failed; in a worker process, typed as it was there, or :class:`WorkerLost`.
    """

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        self._config = config
        self._progress = progress
        self._models: dict[str, _Model] = {}
        self._runs: dict[str, _LoadedRun] = {}
        self._adapters = AdapterCache(config.engine_dir, config.snapshots_in_memory)
        self._captures: dict[int, savepoint_files.StateCapture] = {}
        self._last_captures: dict[str, int] = {}
        # Numbers of different workers never coincide.
        self._numbers = count(os.getpid() << 32)
        self._members: dict[str, set[str]] = {}
        self._streams: dict[str, _TokenStream] = {}
        self._suspended: _SuspendedPass | None = None
        self._sharded: ShardSum | None = None
        self._copies: dict[str, Adapter] = {}

    @property
    def status(self) -> WorkerStatus | None:
        """The worker process; None: this process computes."""
        return None

    def start(self) -> None:
        """Start, also again after the worker was lost; returns before models are loaded. Here nothing has to be started."""

    def check(self) -> None:
        """Raise :class:`WorkerLost` if the worker has exited; this process has not."""

    def close(self) -> None:
        """Release runs and models."""
        self._runs.clear()
        self._copies.clear()
        self._models.clear()

    def load(self, source: str) -> ModelInfo:
        """Load a base model, if it is not loaded."""
        known = self._models.get(source)
        if known is not None:
            return known.info
        # Idle math threads spin for microseconds and then sleep. Spinning longer, the default, halves the speed as soon as
        # anything else needs a core; sleeping immediately costs a sixth on a quiet machine. It takes effect only before
        # torch is loaded, and the user's own setting wins.
        if "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        from tinkex.engine.model.catalog import load_model
        from tinkex.engine.model.progress import report
        from tinkex.engine.model.threads import compute_with_threads
        from tinkex.engine.sampler.sampler import Sampler
        from tinkex.engine.trainer.trainer import Trainer

        if self._config.threads is not None:
            compute_with_threads(self._config.threads)
        loaded = load_model(source, self._config.models_home, self._progress)
        trainer = Trainer(
            loaded.transformer,
            max_tokens_per_pass=self._config.max_tokens_per_pass,
            deterministic=self._config.deterministic,
        )
        sampler = Sampler(
            loaded.transformer,
            loaded.tokenizer,
            max_batch=self._config.max_decode_batch,
            kv_budget_bytes=self._config.kv_cache_bytes,
            compute=self._config.sampler_compute,
        )
        info = ModelInfo(
            directory=loaded.directory,
            arch=loaded.transformer.arch,
            passes=trainer.limits,
            samples=sampler.limits,
            computes_with=sampler.computes_with,
        )
        logger.info("%s: samples are computed by %s", source, sampler.computes_with)
        self._models[source] = _Model(loaded, trainer, sampler, info)
        report(self._progress, "")
        return info

    def check_loss(self, request: CreateCustomLossRequest) -> None:
        """Raise ``InvalidInput`` for an uploaded loss that cannot be run; safe on any thread."""
        _parse(request)

    # ---- runs

    def create(self, run_id: str, source: str, lora: LoraConfig) -> None:
        """Create a run in memory; the base model must be loaded."""
        model = self._models[source]
        self._runs[run_id] = _LoadedRun(model, model.trainer.create(lora))

    def forget(self, run_id: str) -> None:
        """Drop a run from memory, if it is there; never fails."""
        self._runs.pop(run_id, None)
        self._last_captures.pop(run_id, None)

    def state(self, run_id: str) -> TrainState:
        """The weights, moments and gradient of a run in memory."""
        return self._runs[run_id].state

    def run_pass(self, jobs: Sequence[PassJob], *, share_prefixes: bool) -> Sequence[PassReport] | None:
        """Run passes of runs of one base model together; each fails or succeeds alone.

        Returns None if their custom losses have taken so long that others should have their turn: :meth:`resume_pass` continues
        with it. One pass at a time is suspended; others that run meanwhile run to their end.
        """
        from tinkex.engine.trainer.state import TrainJob

        train_jobs = [
            TrainJob(
                self._runs[job.run_id].state,
                job.examples,
                job.loss_fn,
                backward=job.backward,
                custom_loss=_graph(job.custom_loss) if job.custom_loss is not None else None,
            )
            for job in jobs
        ]
        trainer = self._runs[jobs[0].run_id].model.trainer
        if self._suspended is not None:
            return _pass_reports(train_jobs, trainer.run(train_jobs, share_prefixes=share_prefixes))
        self._suspended = train_jobs, trainer.run_in_slices(train_jobs, share_prefixes=share_prefixes)
        return self.resume_pass()

    def resume_pass(self) -> Sequence[PassReport] | None:
        """Continue with the suspended pass; returns what :meth:`run_pass` returns."""
        assert self._suspended is not None, "a pass is suspended"
        train_jobs, slices = self._suspended
        try:
            next(slices)
        except StopIteration as ended:
            self._suspended = None
            return _pass_reports(train_jobs, ended.value)
        except BaseException:
            self._suspended = None
            raise
        return None

    # ---- passes in shards

    def begin_shards(
        self, job: PassJob, shards: Sequence[Sequence[int]], *, share_prefixes: bool, threads: int
    ) -> None:
        """Begin a pass that is computed in shards, of the datums that ``shards`` has; a pass begun before is discarded.

        They are computed with so many threads wherever it is, 0 are those of the lane. The run changes with ``end_shards``.
        """
        from tinkex.engine.trainer.shard_sum import ShardSum

        run = self._runs[job.run_id]
        self._sharded = ShardSum(
            run.model.trainer,
            run.state,
            job.examples,
            job.loss_fn,
            shards,
            backward=job.backward,
            share_prefixes=share_prefixes,
            threads=threads,
        )

    def compute_shard(self, number: int) -> bool:
        """Compute a shard of the pass that was begun; returns False if it failed."""
        assert self._sharded is not None, "a pass was begun"
        return self._sharded.compute(number)

    def add_shard(self, number: int, result: ShardResult) -> None:
        """Add a shard that another trainer has computed."""
        assert self._sharded is not None, "a pass was begun"
        self._sharded.add(number, result)

    def end_shards(self) -> PassReport | None:
        """Add the gradient of all shards to the run; returns None, with the run unchanged, if it is not finite."""
        assert self._sharded is not None, "a pass was begun"
        shards, self._sharded = self._sharded, None
        output = shards.finish()
        if output is None:
            return None
        encoded = wire_proto.encode_forward_backward_output(output)
        num_datums = len(output.loss_fn_outputs)
        return PassReport(encoded, 0, 0, shards.tokens_computed, output.metrics, num_datums)

    def discard_shards(self) -> None:
        """Discard the pass that was begun, if there is one; never fails."""
        self._sharded = None

    def copy_adapter(self, run_id: str, key: str) -> AdapterCopy:
        """The weights of a run, which later steps do not change, by value."""
        from tinkex.engine.model.adapter_copy import AdapterCopy

        run = self._runs[run_id]
        return AdapterCopy.of(run.model.trainer.snapshot(run.state), key)

    def keep_copy(self, source: str, copy: AdapterCopy) -> None:
        """Keep the weights of a run of another trainer, for shards; ``EngineFailure`` if they are not what was sent."""
        self._copies[copy.key] = copy.adapter(self._models[source].info.arch)

    def drop_copy(self, key: str) -> None:
        """Drop the weights of a run of another trainer, if they are there; never fails."""
        self._copies.pop(key, None)

    def run_shard(self, task: ShardTask) -> ShardResult | None:
        """Compute a shard of another trainer; returns None if the copy of the adapter is not here."""
        from tinkex.engine.trainer.shard_sum import compute_shard

        adapter = self._copies.get(task.adapter)
        if adapter is None:
            return None
        return compute_shard(
            self._models[task.source].trainer,
            adapter,
            task.examples,
            task.loss_fn,
            backward=task.backward,
            share_prefixes=task.share_prefixes,
            threads=task.threads,
        )

    # ---- optimizer steps, and weights

    def optim_step(self, run_id: str, params: AdamParams) -> dict[str, float]:
        """Run one optimizer step of a run; returns its metrics."""
        run = self._runs[run_id]
        return run.model.trainer.optim_step(run.state, params)

    def optim_steps(self, steps: Sequence[tuple[str, AdamParams]], results: list[StepResult]) -> None:
        """Run optimizer steps of several runs; appends the metrics of each, or its error, as soon as it has ended."""
        for run_id, params in steps:
            try:
                results.append(self.optim_step(run_id, params))
            except Exception as error:  # noqa: BLE001 -- the caller decides what it means
                results.append(error)

    def load_weights(self, run_id: str, directory: Path, *, optimizer: bool) -> None:
        """Replace the state of a run by a checkpoint; without ``optimizer``, Adam starts from zero."""
        run = self._runs[run_id]
        run.model.trainer.load(run.state, directory, optimizer=optimizer)

    def save_weights(self, run_id: str, directory: Path, base_model: str, *, optimizer: bool) -> None:
        """Write a checkpoint of a run into a directory."""
        run = self._runs[run_id]
        run.model.trainer.save(run.state, directory, base_model, optimizer=optimizer)

    def export_weights(
        self, run_id: str, directory: Path, base_model: str, recipients: Sequence[str] | None
    ) -> None:
        """Write the weights of a run for use elsewhere into a directory."""
        run = self._runs[run_id]
        write_export(directory, run.model.trainer.snapshot(run.state), base_model, recipients)

    def import_weights(
        self, source: Path, directory: Path, base: Path, base_model: str, lora: LoraConfig
    ) -> None:
        """Validate uploaded weights and write them as a checkpoint into a directory; safe on any thread."""
        write_import(source, directory, base, base_model, lora)

    # ---- savepoints

    def capture(self, run_id: str) -> int:
        """Copy the exact state of a run, which later turns do not change; returns a number for it, valid until it is written."""
        number = next(self._numbers)
        # A capture that was never written is superseded.
        self._captures.pop(self._last_captures.get(run_id, number), None)
        self._captures[number] = savepoint_files.capture(self._runs[run_id].state)
        self._last_captures[run_id] = number
        return number

    def write_savepoint(self, capture: int, file: Path) -> bytes:
        """Write a captured state into a file, and release it; returns the file's digest."""
        return savepoint_files.write(self._captures.pop(capture), file)

    def restore(self, source: str, savepoint: SavepointRow) -> None:
        """Restore a run from its savepoint, bit for bit; ``CorruptState`` if the file is not what was written."""
        model = self._models[source]
        state = savepoint_files.restore(self._config.engine_dir, savepoint, model.info.arch, source)
        self._runs[savepoint.run_id] = _LoadedRun(model, state)

    # ---- samples

    def keep_adapter(self, run_id: str, directory: str) -> None:
        """Cache the current adapter of a run as the contents of a directory, so that it need not be read; never fails."""
        run = self._runs[run_id]
        self._adapters.put(directory, run.model.trainer.snapshot(run.state))

    def drop_adapter(self, directory: str) -> None:
        """Drop a cached adapter whose directory is being deleted; never fails."""
        self._adapters.drop(directory)

    def sample(self, source: str, step: DecodeStep) -> DecodeReport:
        """Run one decode step of a base model."""
        model, members = self._models[source], self._members.setdefault(source, set())
        sampler = model.sampler
        for request_id in step.cancel:
            sampler.cancel(request_id)
            self._remove(members, request_id)
        ended: list[tuple[str, SampleResponse | TinkexError]] = []
        try:
            for request in step.add:
                try:
                    self._add(model, request)
                    members.add(request.request_id)
                except TinkexError as error:
                    ended.append((request.request_id, error))
            for request_id in step.stream:
                self._stream(sampler, request_id)
            ended += sampler.step() if sampler.busy else ()
        except Exception:
            # The state of the batch is unknown: it is emptied, and the next samples start from scratch.
            for request_id in list(members):
                sampler.cancel(request_id)
                self._remove(members, request_id)
            raise
        deltas = [delta for stream in self._streams.values() for delta in stream.take()]
        for request_id, _ in ended:
            self._remove(members, request_id)
        return DecodeReport(
            ended, deltas, BatchStats(sampler.num_sequences, sampler.kv_bytes, sampler.num_preemptions)
        )

    def _add(self, model: _Model, request: AddRequest) -> None:
        from tinkex.engine.sampler.job import SampleJob

        adapter = None
        if request.directory is not None:
            adapter = self._adapters.get(request.directory, model.info.arch)
        model.sampler.add(
            SampleJob.of(
                request.request,
                request_id=request.request_id,
                adapter=adapter,
                sequence_ids=request.sequence_ids,
                owner=request.owner,
            )
        )
        if request.stream:
            self._stream(model.sampler, request.request_id)

    def _stream(self, sampler: Sampler, request_id: str) -> None:
        stream = _TokenStream(request_id)
        if sampler.watch(request_id, stream.grew):
            self._streams[request_id] = stream

    def _remove(self, members: set[str], request_id: str) -> None:
        members.discard(request_id)
        self._streams.pop(request_id, None)


class _TokenStream:
    """The new tokens of one streamed sample."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._grown: dict[int, Continuation] = {}
        self._reported: dict[int, int] = {}

    def grew(self, sequence: Continuation) -> None:
        """Record a sequence that got a token."""
        self._grown[sequence.index] = sequence

    def take(self) -> Iterator[TokenDelta]:
        """The tokens that were not reported yet."""
        for index, sequence in self._grown.items():
            start, end = self._reported.get(index, 0), len(sequence.tokens)
            self._reported[index] = end
            yield TokenDelta(
                self._request_id,
                index,
                start,
                sequence.tokens[start:end],
                sequence.logprobs[start:end],
                sequence.stop_reason,
                sequence.topk(start, end),
            )
        self._grown.clear()


@lru_cache(MAX_LOSSES_IN_MEMORY)
def _graph(uploaded: UploadedLoss) -> LossGraph:
    """The graph of an uploaded loss; the last ones used stay in memory."""
    return _parse(wire_json.decode(uploaded.definition, CreateCustomLossRequest))


def _parse(request: CreateCustomLossRequest) -> LossGraph:
    from tinkex.engine.trainer.loss_graph import LossGraph

    return LossGraph.parse(msgspec.to_builtins(request.graph), request.inputs)


def _pass_reports(
    jobs: Sequence[TrainJob], outputs: Sequence[ForwardBackwardOutput | TinkexError]
) -> Sequence[PassReport]:
    return [
        PassReport(
            output if isinstance(output, TinkexError) else wire_proto.encode_forward_backward_output(output),
            job.effort.num_tokens,
            job.effort.num_datums,
            job.effort.tokens_computed,
            {} if isinstance(output, TinkexError) else output.metrics,
            len(job.data),
        )
        for job, output in zip(jobs, outputs, strict=True)
    ]
