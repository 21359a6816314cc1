"""One training job during its passes: its examples, gradient and results.

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
from tinkex.engine.trainer.loss_graph import DatumLoss
from tinkex.engine.trainer.losses import CUSTOM, SEQUENCE_LOG_RATIO, Loss
from tinkex.engine.trainer.optim import all_finite
from tinkex.engine.trainer.state import TrainJob
from tinkex.errors import InvalidInput, NumericalError, TinkexError
from tinkex.types.losses import ForwardBackwardOutput
from tinkex.types.tensors import TensorData

__all__ = ["RunningJob"]

Floats = npt.NDArray[np.float32]


class RunningJob:
    """A job's examples, gradient and results; only ``finish`` changes the job's state.

    Example:
        >>> running = RunningJob(job, LOSSES["cross_entropy"], examples, BufferPool(max_bytes=2**29))
        >>> running.start()
        >>> output = running.finish()  # after its passes
    """

    def __init__(self, job: TrainJob, loss: Loss, examples: Sequence[Example], buffers: BufferPool) -> None:
        self.job = job
        self.loss = loss
        self.examples = examples
        self.error: TinkexError | None = None
        self.grad: Tensor | None = None
        self._buffers = buffers
        self.adapter: Adapter = job.state.adapter
        self._lp: dict[int, Floats] = {}
        self._losses: dict[int, Floats] = {}
        self._inputs: dict[int, Mapping[str, Floats]] = {}
        self._custom: dict[int, DatumLoss] = {}

    def start(self) -> None:
        """Prepares for the passes, and discards the results of earlier ones."""
        self.error = None
        self._lp, self._losses, self._inputs, self._custom = {}, {}, {}, {}
        if self.job.backward:
            self.grad = (
                self._buffers.zeros_like(self.adapter.params) if self.grad is None else self.grad.zero_()
            )

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

    def run_graph(self, member: PackedExample, lp_P: Tensor) -> Tensor:
        """Computes and records the custom loss of one datum; returns its derivative by each logprob, 0 if it failed."""
        graph, example = self.job.custom_loss, member.example
        assert graph is not None
        gradient_P = torch.zeros_like(lp_P)
        inputs = [torch.from_numpy(array.copy()) for array in example.graph_inputs]
        try:
            result = graph.evaluate(lp_P.reshape(example.shape), inputs, backward=self.grad is not None)
        except InvalidInput as error:
            self.error = self.error or InvalidInput(f"data[{member.index}]: {error}")
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

    def finish(self) -> ForwardBackwardOutput | TinkexError:
        """The job's output, with its gradient added to the state; or its error, with the state unchanged."""
        if self.error is None and self.grad is not None and not all_finite(self.grad):
            self.fail("the gradient is not finite")
        if self.error is not None:
            self._buffers.release(self.grad)
            return self.error
        fields = {"logprobs": self._lp}
        if self.loss is not CUSTOM:  # its loss is per datum, not per token
            fields["elementwise_loss"] = self._losses
        state = self.job.state
        if self.grad is not None and state.grad is None:
            state.grad = self.grad
        elif self.grad is not None and state.grad is not None:
            state.grad.add_(self.grad)
            self._buffers.release(self.grad)
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
        return metrics

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
