"""Training jobs during their passes: examples, results, and the gradient of those on one state.

Shapes: P target tokens of a datum or segment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkex.engine.model.lora import UNEMBED_MODULE, Adapter
from tinkex.engine.trainer.batch import PackedExample
from tinkex.engine.trainer.buffers import BufferPool
from tinkex.engine.trainer.examples import Example
from tinkex.engine.trainer.head import HeadLora
from tinkex.engine.trainer.loss_effort import EffortSlice
from tinkex.engine.trainer.loss_graph import DatumLoss
from tinkex.engine.trainer.losses import CUSTOM, SEQUENCE_LOG_RATIO, Loss
from tinkex.engine.trainer.optim import all_finite
from tinkex.engine.trainer.state import TrainJob
from tinkex.errors import InvalidInput, NumericalError, TinkexError
from tinkex.types.losses import ForwardBackwardOutput
from tinkex.types.tensors import TensorData

__all__ = ["RunningJob", "RunningTenant"]

Floats = npt.NDArray[np.float32]


class RunningTenant:
    """Jobs on one state that run together, and the gradient they accumulate; only ``finish`` changes the state.

    Example:
        >>> tenant = RunningTenant({0: RunningJob(job, LOSSES["cross_entropy"], examples)}, BufferPool(max_bytes=2**29))
        >>> tenant.start(EffortSlice([job.effort]))
        >>> outputs = tenant.finish()  # after its passes
    """

    def __init__(self, jobs: Mapping[int, RunningJob], buffers: BufferPool) -> None:
        self.jobs = jobs
        """The jobs by their numbers."""
        first = next(iter(jobs.values()))
        self.backward = first.job.backward
        self.grad: Tensor | None = None
        self._state = first.job.state
        self.adapter: Adapter = self._state.adapter
        self._buffers = buffers

    def start(self, effort_slice: EffortSlice) -> None:
        """Prepares for the passes, and discards the results of earlier ones."""
        for running_job in self.jobs.values():
            running_job.start(effort_slice)
        if self.backward:
            self.grad = (
                self._buffers.zeros_like(self.adapter.params) if self.grad is None else self.grad.zero_()
            )

    @property
    def has_failed(self) -> bool:
        """Whether one of its jobs has failed."""
        return any(running_job.error is not None for running_job in self.jobs.values())

    def head_lora(self) -> HeadLora | None:
        """The LoRA of the unembedding, if the adapter has one."""
        pair = self.adapter.views.get((UNEMBED_MODULE, None))
        if pair is None:
            return None
        a_RD, b_VR = pair
        if self.grad is None:
            return HeadLora(a_RD, b_VR, self.adapter.spec.scale)
        grad_a_RD, grad_b_VR = self.adapter.with_params(self.grad).views[UNEMBED_MODULE, None]
        return HeadLora(a_RD, b_VR, self.adapter.spec.scale, grad_a_RD, grad_b_VR)

    def check_gradient(self) -> None:
        """Fails all jobs if their gradient is not finite."""
        if self.grad is not None and not self.has_failed and not all_finite(self.grad):
            for running_job in self.jobs.values():
                running_job.fail("the gradient is not finite")

    def alone(self) -> list[RunningTenant]:
        """Its jobs as tenants of their own, from the beginning; the gradient of all of them is discarded."""
        self._buffers.release(self.grad)
        self.grad = None
        return [
            RunningTenant({number: running_job}, self._buffers) for number, running_job in self.jobs.items()
        ]

    def finish(self) -> Mapping[int, ForwardBackwardOutput | TinkexError]:
        """The output of every job, with the gradient added to the state; or, if one has failed, the state unchanged."""
        if self.grad is not None and not self.has_failed and self._state.grad is None:
            self._state.grad = self.grad
        else:
            if self.grad is not None and not self.has_failed and self._state.grad is not None:
                self._state.grad.add_(self.grad)
            self._buffers.release(self.grad)
        self.grad = None
        return {number: running_job.output() for number, running_job in self.jobs.items()}


class RunningJob:
    """A job's examples and results.

    Example:
        >>> running = RunningJob(job, LOSSES["cross_entropy"], examples)
        >>> running.start(EffortSlice([job.effort]))
        >>> output = running.output()  # after its passes
    """

    def __init__(self, job: TrainJob, loss: Loss, examples: Sequence[Example]) -> None:
        self.job = job
        self.loss = loss
        self.examples = examples
        self.error: TinkexError | None = None
        self._lp: dict[int, Floats] = {}
        self._losses: dict[int, Floats] = {}
        self._inputs: dict[int, Mapping[str, Floats]] = {}
        self._custom: dict[int, DatumLoss] = {}
        self._slice = EffortSlice([])
        self._waiting: Sequence[tuple[PackedExample, Tensor]] = ()
        self._gradients: dict[int, Tensor] = {}

    def start(self, effort_slice: EffortSlice) -> None:
        """Prepares for the passes, and discards the results of earlier ones."""
        self.error = None
        self._slice, self._waiting, self._gradients = effort_slice, (), {}
        self.job.effort.start(sum(example.num_tokens for example in self.examples))
        self._lp, self._losses, self._inputs, self._custom = {}, {}, {}, {}

    def prepare_graphs(self, members: Sequence[PackedExample], lp_P: Sequence[Tensor]) -> None:
        """Sets the datums whose custom losses are computed next, and their logprobs."""
        self._waiting = list(zip(members, lp_P, strict=True))

    def run_graphs(self) -> Sequence[Tensor]:
        """Computes and records their custom losses; returns the derivative by each logprob, 0 if it failed.

        Raises ``SliceUsed`` between two datums, and continues there when it is called again.
        """
        for member, lp_P in self._waiting:
            if member.index not in self._gradients:
                self._slice.check()
                self._gradients[member.index] = self._run_graph(member, lp_P)
        return [self._gradients[member.index] for member, _ in self._waiting]

    def _run_graph(self, member: PackedExample, lp_P: Tensor) -> Tensor:
        graph, example = self.job.custom_loss, member.example
        assert graph is not None
        gradient_P = torch.zeros_like(lp_P)
        if self.error is not None:
            return gradient_P
        inputs = [torch.from_numpy(array.copy()) for array in example.graph_inputs]
        try:
            result = graph.evaluate(
                lp_P.reshape(example.shape), inputs, backward=self.job.backward, effort=self.job.effort
            )
        except InvalidInput as error:
            self.error = InvalidInput(f"data[{member.index}]: {error}")
            return gradient_P
        if not math.isfinite(result.loss):
            self.fail(f"the loss of data[{member.index}] is {result.loss}")
        elif result.gradient is not None and not bool(torch.isfinite(result.gradient).all()):
            self.fail(f"the gradient of data[{member.index}] is not finite")
        elif result.gradient is not None:
            gradient_P = result.gradient.reshape(-1)
        self._custom[member.index] = result
        return gradient_P

    def record(
        self, members: Sequence[PackedExample], lp_P: Floats, loss_P: Floats, inputs: Mapping[str, Floats]
    ) -> None:
        """Records the logprobs and losses of some of the job's datums, packed one after the other."""
        start = 0
        for member in members:
            stop = start + member.example.targets.size
            part = slice(start, stop)
            self._lp[member.index], self._losses[member.index] = lp_P[part], loss_P[part]
            self._inputs[member.index] = {name: values[part] for name, values in inputs.items()}
            lost = np.flatnonzero(~np.isfinite(lp_P[part]))
            wrong = np.flatnonzero(~np.isfinite(loss_P[part])) if self.loss is not CUSTOM else np.empty(0)
            if lost.size:
                at = int(lost[0])
                self.fail(
                    f"the learner's logprob of data[{member.index}] at flat position {at} is {lp_P[start + at]}",
                    "The adapter's weights are too large; load an earlier checkpoint, and use a smaller learning rate",
                )
            elif wrong.size:
                at = int(wrong[0])
                self.fail(
                    f"the loss of data[{member.index}] at flat position {at} is {loss_P[start + at]} "
                    f"(the learner's logprob there is {lp_P[start + at]:g})"
                )
            start = stop

    def fail(self, what: str, hint: str | None = None) -> None:
        """Fails the job with a ``NumericalError``; its state does not change."""
        hint = hint or (
            "Look for logarithms and divisions of 0, and for large exponents"
            if self.loss is CUSTOM
            else "Check that weights and advantages are moderate and that 'logprobs' are those of these target tokens"
        )
        self.error = NumericalError(f"{self.job.loss_fn}: {what}; nothing was accumulated. {hint}")

    def output(self) -> ForwardBackwardOutput | TinkexError:
        """The job's output, or its error."""
        if self.error is not None:
            return self.error
        fields = {"logprobs": self._lp}
        if self.loss is not CUSTOM:  # its loss is per datum, not per token
            fields["elementwise_loss"] = self._losses
        outputs = [
            {
                name: TensorData.from_numpy(values[index].reshape(example.shape))
                for name, values in fields.items()
            }
            for index, example in enumerate(self.examples)
        ]
        return ForwardBackwardOutput(self.loss.output_type, outputs, self._metrics())

    def _metrics(self) -> dict[str, float]:
        """Sums over all tokens, and means over datums, so that the chunks of one call combine exactly."""
        num_tokens = float(sum(example.num_tokens for example in self.examples))
        if self.loss is CUSTOM:
            return {**self._custom_metrics(), "num_tokens:sum": num_tokens}
        metrics = {
            "loss:sum": sum(float(loss_P.sum(dtype=np.float64)) for loss_P in self._losses.values()),
            "num_tokens:sum": num_tokens,
        }
        if "weights" in self._inputs[0]:
            metrics["weights:sum"] = sum(
                float(i["weights"].sum(dtype=np.float64)) for i in self._inputs.values()
            )
        if "advantages" in self._inputs[0]:
            gaps, clipped = zip(*(self._policy_means(index) for index in self._inputs), strict=True)
            metrics["kl_q_p:mean"] = float(np.mean(gaps))
            if self.loss.clipped is not None:
                metrics["clip_fraction:mean"] = float(np.mean(clipped))
        if "logprobs" in self._inputs[0]:
            metrics["logprob_gap:mean"] = float(np.mean([self._logprob_gap(index) for index in self._inputs]))
        return metrics

    def _logprob_gap(self, index: int) -> float:
        """The mean of |lp − q| over one datum's tokens that the caller has a logprob of; prompts have zeros, and no advantage."""
        inputs, lp_P = self._inputs[index], self._lp[index]
        sampled = inputs["logprobs"] != 0
        if "advantages" in inputs:
            sampled = sampled | (inputs["advantages"] != 0)
        gap_P = np.abs(lp_P[sampled] - inputs["logprobs"][sampled])
        return float(gap_P.mean(dtype=np.float64)) if gap_P.size else 0.0

    def _custom_metrics(self) -> dict[str, float]:
        """The sum of the losses, and each metric over all datums, reduced by its suffix."""
        results = [self._custom[index] for index in range(len(self.examples))]
        metrics = {"loss:sum": math.fsum(result.loss for result in results)}
        for name in results[0].metrics:
            total = sum(result.metrics[name] for result in results)
            metrics[name] = total / len(results) if name.endswith(":mean") else total
        return metrics

    def _policy_means(self, index: int) -> tuple[float, float]:
        """Over one datum's tokens with an advantage: the mean of q − lp, and the fraction that is clipped."""
        inputs, lp_P = self._inputs[index], self._lp[index]
        counted = inputs["advantages"] != 0
        if not counted.any():
            return 0.0, 0.0
        gap_P = inputs["logprobs"] - lp_P
        log_ratio_P = inputs.get(SEQUENCE_LOG_RATIO, -gap_P)
        share = 0.0
        if self.loss.clipped is not None:
            tensors = {name: torch.from_numpy(values) for name, values in inputs.items()}
            share = float(self.loss.clipped(torch.from_numpy(log_ratio_P), tensors).numpy()[counted].mean())
        return float(gap_P[counted].mean(dtype=np.float64)), share
