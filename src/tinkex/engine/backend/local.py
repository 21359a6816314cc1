"""Computing in this process: base models with their trainers and samplers, and the runs on them."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tinkex._wire import json as wire_json
from tinkex._wire import proto as wire_proto
from tinkex.engine.backend import savepoint_files
from tinkex.engine.backend.exports import write_export
from tinkex.engine.backend.seam import (
    Batch,
    Checkpoint,
    Growth,
    Join,
    ModelFacts,
    PassJob,
    PassResult,
    SampleReport,
    SampleStep,
    SavedFile,
    UploadedLoss,
    WorkerStatus,
)
from tinkex.engine.backend.snapshots import Snapshots
from tinkex.errors import TinkexError
from tinkex.types import CreateCustomLossRequest

if TYPE_CHECKING:
    from tinkex.engine.config import EngineConfig
    from tinkex.engine.model.catalog import LoadedModel, Progress
    from tinkex.engine.sampler.request import Continuation
    from tinkex.engine.sampler.sampler import Sampler
    from tinkex.engine.trainer.loss_graph import LossGraph
    from tinkex.engine.trainer.state import TrainState
    from tinkex.engine.trainer.trainer import Trainer
    from tinkex.types import AdamParams, LoraConfig, SampleResponse

logger = logging.getLogger("tinkex.engine")

MOST_LOSSES_IN_MEMORY = 256


@dataclass(frozen=True)
class _Model:
    """A base model in memory."""

    loaded: LoadedModel
    trainer: Trainer
    sampler: Sampler
    facts: ModelFacts


@dataclass(frozen=True)
class _Run:
    """A run in memory, on its base model."""

    model: _Model
    state: TrainState


class LocalBackend:
    """Computes on whatever thread calls it; see :class:`~tinkex.engine.backend.seam.Backend`."""

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        self._config = config
        self._progress = progress
        self._models: dict[str, _Model] = {}
        self._runs: dict[str, _Run] = {}
        self._snapshots = Snapshots(config.engine_dir, config.snapshots_in_memory)
        self._losses = _Losses()
        self._captures: dict[int, savepoint_files.Capture] = {}
        self._last_captures: dict[str, int] = {}
        # No number stands for a state of another worker.
        self._numbers = count(os.getpid() << 32)
        self._members: dict[str, set[str]] = {}
        self._watched: dict[str, _Watched] = {}

    @property
    def status(self) -> WorkerStatus | None:
        """None: this process computes."""
        return None

    def start(self) -> None:
        """Nothing is needed."""

    def check(self) -> None:
        """This process is there."""

    def close(self) -> None:
        """Let go of everything."""
        self._runs.clear()
        self._models.clear()

    def load(self, source: str) -> ModelFacts:
        """Bring a base model into memory, if it is not there."""
        known = self._models.get(source)
        if known is not None:
            return known.facts
        # Math threads that wait spin for microseconds and then sleep. Spinning longer, as is the default, halves the speed
        # as soon as anything else wants a core; sleeping at once costs a sixth on a quiet machine. It counts only
        # before torch is loaded, and what the user has set stands.
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
        facts = ModelFacts(
            directory=loaded.directory,
            arch=loaded.transformer.arch,
            passes=trainer.limits,
            samples=sampler.limits,
            computes_with=sampler.computes_with,
        )
        logger.info("%s: samples are computed by %s", source, sampler.computes_with)
        self._models[source] = _Model(loaded, trainer, sampler, facts)
        report(self._progress, "")
        return facts

    def check_loss(self, request: CreateCustomLossRequest) -> None:
        """Refuse an uploaded loss that cannot be run; from any thread."""
        _parse(request)

    # ---- runs

    def create(
        self, run_id: str, source: str, lora: LoraConfig, checkpoint: Checkpoint | None = None
    ) -> None:
        """Put a run into memory, fresh or as a checkpoint has it."""
        model = self._models[source]
        state = model.trainer.create(lora)
        if checkpoint is not None:
            model.trainer.load(state, checkpoint.directory, optimizer=checkpoint.optimizer)
        self._runs[run_id] = _Run(model, state)

    def forget(self, run_id: str) -> None:
        """Drop a run from memory, if it is there."""
        self._runs.pop(run_id, None)
        self._last_captures.pop(run_id, None)

    def state(self, run_id: str) -> TrainState:
        """The weights, moments and gradient of a run in memory."""
        return self._runs[run_id].state

    def run_pass(self, jobs: Sequence[PassJob]) -> Sequence[PassResult]:
        """Run passes of runs of one base model together; each fails or succeeds alone."""
        from tinkex.engine.trainer.state import TrainJob

        results = self._runs[jobs[0].run_id].model.trainer.run(
            [
                TrainJob(
                    self._runs[job.run_id].state,
                    job.data,
                    job.loss_fn,
                    job.loss_fn_config,
                    job.backward,
                    self._losses.find(job.custom_loss) if job.custom_loss is not None else None,
                )
                for job in jobs
            ]
        )
        return [
            result if isinstance(result, TinkexError) else wire_proto.encode_forward_backward_output(result)
            for result in results
        ]

    def optim_step(self, run_id: str, params: AdamParams) -> dict[str, float]:
        """One optimizer step of a run; returns its metrics."""
        run = self._runs[run_id]
        return run.model.trainer.optim_step(run.state, params)

    def load_weights(self, run_id: str, checkpoint: Checkpoint) -> None:
        """Put a checkpoint in the place of what a run has."""
        run = self._runs[run_id]
        run.model.trainer.load(run.state, checkpoint.directory, optimizer=checkpoint.optimizer)

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

    # ---- savepoints

    def capture(self, run_id: str) -> int:
        """Take the exact state of a run; the number stands for it until it is written."""
        number = next(self._numbers)
        # One that was never written is of no use any more.
        self._captures.pop(self._last_captures.get(run_id, number), None)
        self._captures[number] = savepoint_files.capture(self._runs[run_id].state)
        self._last_captures[run_id] = number
        return number

    def write_savepoint(self, capture: int, file: Path) -> bytes:
        """Write what was captured into a file, and let go of it; returns the file's digest."""
        return savepoint_files.write(self._captures.pop(capture), file)

    def restore(self, run_id: str, source: str, saved: SavedFile) -> None:
        """Put a run into memory as a savepoint has it, bit for bit."""
        model = self._models[source]
        self._runs[run_id] = _Run(model, savepoint_files.restore(saved, model.facts.arch, source))

    # ---- samples

    def keep_adapter(self, run_id: str, directory: str) -> None:
        """Remember that a directory holds the adapter that a run has at the moment."""
        run = self._runs[run_id]
        self._snapshots.put(directory, run.model.trainer.snapshot(run.state))

    def drop_adapter(self, directory: str) -> None:
        """Forget an adapter whose directory is being deleted."""
        self._snapshots.drop(directory)

    def sample(self, source: str, step: SampleStep) -> SampleReport:
        """One step of the samples of a base model."""
        model, members = self._models[source], self._members.setdefault(source, set())
        sampler = model.sampler
        for request_id in step.leave:
            sampler.cancel(request_id)
            self._left(members, request_id)
        ended: list[tuple[str, SampleResponse | TinkexError]] = []
        try:
            for join in step.join:
                try:
                    self._join(model, join)
                    members.add(join.request_id)
                except TinkexError as error:
                    ended.append((join.request_id, error))
            for request_id in step.watch:
                self._watch(sampler, request_id)
            ended += sampler.step() if sampler.busy else ()
        except Exception:
            # The state of the batch is unknown: everyone in it leaves, and the next samples start afresh.
            for request_id in list(members):
                sampler.cancel(request_id)
                self._left(members, request_id)
            raise
        grown = [growth for watched in self._watched.values() for growth in watched.take()]
        for request_id, _ in ended:
            self._left(members, request_id)
        return SampleReport(
            ended, grown, Batch(sampler.num_sequences, sampler.kv_bytes, sampler.num_preemptions)
        )

    def _join(self, model: _Model, join: Join) -> None:
        from tinkex.engine.sampler.job import SampleJob

        adapter = None
        if join.directory is not None:
            adapter = self._snapshots.get(join.directory, model.facts.arch)
        model.sampler.add(
            SampleJob.of(
                join.request,
                request_id=join.request_id,
                adapter=adapter,
                sequence_ids=join.sequence_ids,
                owner=join.owner,
            )
        )
        if join.watched:
            self._watch(model.sampler, join.request_id)

    def _watch(self, sampler: Sampler, request_id: str) -> None:
        watched = _Watched(request_id)
        if sampler.watch(request_id, watched.grew):
            self._watched[request_id] = watched

    def _left(self, members: set[str], request_id: str) -> None:
        members.discard(request_id)
        self._watched.pop(request_id, None)


class _Watched:
    """The sequences of a sample that somebody watches, and how far they were reported."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._grown: dict[int, Continuation] = {}
        self._reported: dict[int, int] = {}

    def grew(self, sequence: Continuation) -> None:
        """Note a sequence that got a token."""
        self._grown[sequence.index] = sequence

    def take(self) -> Iterator[Growth]:
        """What was not reported yet."""
        for index, sequence in self._grown.items():
            start, end = self._reported.get(index, 0), len(sequence.tokens)
            self._reported[index] = end
            yield Growth(
                self._request_id,
                index,
                start,
                sequence.tokens[start:end],
                sequence.logprobs[start:end],
                sequence.stop_reason,
            )
        self._grown.clear()


class _Losses:
    """Uploaded losses, ready to run; the last ones used stay in memory."""

    def __init__(self) -> None:
        self._graphs: OrderedDict[str, LossGraph] = OrderedDict()

    def find(self, uploaded: UploadedLoss) -> LossGraph:
        """The graph of an uploaded loss."""
        graph = self._graphs.get(uploaded.loss_id)
        if graph is None:
            graph = _parse(wire_json.decode(uploaded.definition, CreateCustomLossRequest))
        self._graphs[uploaded.loss_id] = graph
        self._graphs.move_to_end(uploaded.loss_id)
        while len(self._graphs) > MOST_LOSSES_IN_MEMORY:
            self._graphs.popitem(last=False)
        return graph


def _parse(request: CreateCustomLossRequest) -> LossGraph:
    from tinkex.engine.trainer.loss_graph import LossGraph

    return LossGraph.parse(msgspec.to_builtins(request.graph), request.inputs)
