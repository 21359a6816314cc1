"""The training state of a model, and a training job on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from tinkex.engine.model.lora import Adapter
from tinkex.engine.trainer.examples import Example
from tinkex.engine.trainer.loss_effort import PassEffort
from tinkex.engine.trainer.loss_graph import LossGraph
from tinkex.types.inputs import Datum

__all__ = ["TrainJob", "TrainState"]


@dataclass(eq=False)
class TrainState:
    """The training state of a model: adapter, accumulated gradient and Adam's moments, each one flat fp32 buffer.

    ``None`` is a buffer of zeros that was not needed yet. If ``shared``, a snapshot uses the adapter's buffer too, so the
    next step must write to a copy.

    Example:
        >>> state = trainer.create(LoraConfig(rank=8))
        >>> state.step, state.grad
        (0, None)
    """

    adapter: Adapter
    grad: Tensor | None = field(default=None, repr=False)
    exp_avg: Tensor | None = field(default=None, repr=False)
    exp_avg_sq: Tensor | None = field(default=None, repr=False)
    step: int = 0
    shared: bool = False


@dataclass(frozen=True, eq=False)
class TrainJob:
    """One forward pass over some datums, with or without gradients.

    ``loss_fn`` "custom" runs ``custom_loss``, the graph of its ``loss_id``; other losses have none.

    Example:
        >>> TrainJob(state, data, loss_fn="ppo", loss_fn_config={"clip_high_threshold": 1.3})
    """

    state: TrainState
    data: Sequence[Datum] | Sequence[Example]
    """Datums, or what was read of them before."""
    loss_fn: str
    loss_fn_config: Mapping[str, float | str] | None = None
    backward: bool = True
    custom_loss: LossGraph | None = None
    effort: PassEffort = field(default_factory=PassEffort, repr=False)
    """The budget of its custom loss, and what it has used."""
